"""Invalid options of tasks raise ValueError and name the option."""

import pytest

from mrconv.tasks import task


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("listops", {"source": "web"}),
        ("listops", {"length": 1}),
        ("listops", {"train_size": 0}),
        ("text", {"length": 1}),
        ("text", {"min_freq": 0}),
        ("retrieval", {"length": 1}),
        ("pathfinder", {"source": "file"}),
        ("pathfinder", {"count": 9}),
        ("pathfinder", {"size": 0}),
        ("imagenet", {"size": 0}),
        ("speech", {"words": 12}),
        ("speech", {"normalise": "s5"}),
        ("folder", {"length": -1}),
        ("folder", {"size": -1}),
        ("folder", {"val_fraction": -0.1}),
        ("folder", {"val_fraction": 0.5, "test_fraction": 0.5}),
    ],
)
def test_invalid_options_raise(tmp_path, name, options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} .*got"):
        task(name, tmp_path, **options).prepare()


def test_unknown_option_raises_with_the_closest(tmp_path):
    with pytest.raises(ValueError, match=r"listops has no option 'lengths'; did you mean 'length'\? Its options are"):
        task("listops", tmp_path, lengths=3)
