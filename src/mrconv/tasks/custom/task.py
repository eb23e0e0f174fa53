"""The task of custom data: sequences of any kind from local files, with their labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..._utils.checks import check_choice
from ..base import Task, register_task
from ..cache import Built
from ..errors import DataError, MissingData
from ..progress_callback import Progress, ProgressCounter
from . import encoding
from .file_readers import (
    ARCHIVES,
    MEDIA,
    TABLES,
    Columns,
    Examples,
    class_folders,
    is_media,
    read_jsonl,
    read_media,
    read_npz,
    read_table,
    suffix,
)
from .label_tables import LABEL_FILES, LabelTable, find_table, read_labels
from .labels import FORMATS
from .layout import holds_media, split_paths
from .splits import draw_splits

UNITS = {"text": "characters", "audio": "samples"}  # kinds whose longest example sets the length of the model


@register_task("folder")
@dataclass(frozen=True)
class CustomData(Task):
    """Custom data in a file or folder `path`, whose content determines the kind of the examples.

    - `.npz` with x and y, or x_train, y_train, and likewise val and test. Integers x (n, length) are tokens; anything
      else (n, length[, channels]) is values, stored as float32 unless they are uint8 or int16. `lengths` (n,) are the
      lengths of padded examples.
    - `.csv` or `.tsv` with a header: a column of labels, and a column of texts or else numbers in all others;
      `.jsonl` or `.jsonl.xz` with a text and a label per line. Texts are sequences of characters.
    - a folder or archive with a folder of recordings (WAV, FLAC, OGG, MP3) or images (PNG, JPEG) for each class; or
      with these files anywhere, and a table of their labels (see `labels`).

    `target` is what a model predicts, and what the labels are:

    | target | column of labels in .csv, .tsv | in .jsonl | y in .npz |
    |---|---|---|---|
    | "class" | a name or an integer | the same | integers or strings (n,) |
    | "labels" | names separated by ";" | a list of names | 0 and 1 (n, labels) |
    | "values" | a number, in one or several columns | a number or a list | numbers (n,) or (n, values) |
    | "positions" | a word, or a character, per position | a list | integers or strings (n, length) |

    In "positions", a negative integer of an array and null in a list stand for a position without a label. Recordings
    and images have no labels of positions. Their folders name classes; all other labels come from a table.

    A folder may hold one of these for each split (train.csv, test.csv; train.zip; train/), with or without val. If
    there is only one part, val and test are drawn from it by `seed`. Values are normalised by mean and standard
    deviation of each channel of the training data.

    Sequences keep their lengths: recordings, texts, and arrays with `lengths`. Training hides the padding of a batch
    from every layer by default (`mask_padding`), so that a prediction does not depend on it.

    Files are read as for a prediction: recordings of several channels are averaged and those at other sampling rates
    resampled; images of other sizes are cropped in the middle to the aspect ratio and resized. `facts["changes"]`
    counts these changes; `mrconv data show` and `mrconv train` print them.

    Args:
        path: path of the data.
        length: largest length of a sequence; 0 stands for the longest. Texts are cut to it, including <eos>. Longer
            sequences of other kinds raise an error unless `cut`.
        cut: cut longer sequences.
        window, hop: cut sequences longer than `window` positions (samples of a recording after resampling, characters
            of a text with <eos>) into windows of this length, which start every `hop` positions; the last one ends with
            the sequence. hop=0 stands for `window`: windows do not overlap. Every window is an example with the label
            of its sequence, in the same split. A prediction is the mean over the windows of a sequence.
        val_fraction, test_fraction, seed: sizes and seed of splits that are drawn.
        stratify: draw the splits from each class, at least one example of each.
        group: keep the examples of a group in one split; the fractions are then those of groups. The column of a table,
            an array of `.npz`, or, for recordings and images, a regular expression that is searched in `CLASS/FILE`:
            what it matches is the group, or its first parenthesis where it has one.
        labels: table of the labels of recordings and images: .csv, .tsv or .jsonl, with `file`, the path of a file in
            the data, and a column of labels. "" stands for labels.csv, labels.tsv or labels.jsonl in the folder, in
            the folder of each split, or in the archive. A table replaces the names of folders. `group` may be a column
            of it.
        label_column, text_column: column names of tables; for target "values", several are a list or are separated by
            commas.
        target: "class", "labels" (several classes, or none), "values" (regression) or "positions" (a class for each).
        sample_rate: sampling rate, in samples a second, to which recordings are resampled.
        grey: convert colour images to greyscale.
        size: height and width to which images are resized; 0 stands for the most frequent size in the training data.
        sequence: read images as sequences of pixels in raster order, else as images (height, width, channels).
    """

    path: str = ""
    length: int = 0
    cut: bool = False
    window: int = 0
    hop: int = 0
    val_fraction: float = 0.1
    test_fraction: float = 0.1
    seed: int = 42
    label_column: str = "label"
    text_column: str = "text"
    sample_rate: int = 16000
    grey: bool = False
    size: int = 0
    sequence: bool = True
    target: str = "class"
    stratify: bool = False
    group: str = ""
    labels: str = ""

    title: ClassVar[str] = "custom data: arrays, tables, texts, recordings or images"
    version: ClassVar[int] = 2  # 1: values were padded to one length

    def check(self) -> None:
        """Raise ValueError for invalid options."""
        check_choice("target", self.target, tuple(FORMATS))
        if self.length < 0:
            raise ValueError(f"length must be 0, for the longest, or more; got {self.length}")
        if not (isinstance(self.window, int) and isinstance(self.hop, int) and 0 <= self.hop <= self.window):
            got = f"window={self.window} and hop={self.hop}"
            raise ValueError(f"window must be a number of positions, and hop at most as many; got {got}")
        if self.window and (self.length or self.cut):
            raise ValueError("window sets the length of the examples: leave out length and cut")
        if self.size < 0:
            raise ValueError(f"size must be a number of pixels, or 0 for the most frequent size; got {self.size}")
        if self.sample_rate < 1:
            raise ValueError(f"sample_rate must be positive, in samples a second; got {self.sample_rate}")
        if self.stratify and (self.group or self.target != "class"):
            other = f"group={self.group}" if self.group else f"target={self.target}"
            raise ValueError(f"stratify draws the splits from each class; it cannot be combined with {other}")
        val, test = self.val_fraction, self.test_fraction
        if not (val >= 0 and test >= 0 and val + test < 1):
            raise ValueError(f"val_fraction and test_fraction must be at least 0, in sum below 1; got {val} and {test}")

    def __post_init__(self) -> None:
        """Join a list of columns, so that options are plain values."""
        if not isinstance(self.label_column, str):
            object.__setattr__(self, "label_column", ",".join(self.label_column))

    def options(self) -> dict[str, Any]:
        """Return the options, without defaults of options that are younger than some caches."""
        defaults = {"target": "class", "stratify": False, "group": "", "window": 0, "hop": 0, "labels": ""}
        return {name: z for name, z in super().options().items() if name not in defaults or z != defaults[name]}

    def sources(self) -> Sequence[Path]:
        """Return the files; for a folder, its class folders and files, because the cache may be beside them."""
        sources: list[Path] = []
        paths = self._paths()
        for path in paths.values():
            if path.is_dir():
                sources += class_folders(path, self.cache_root())
                sources += sorted(p for p in path.iterdir() if p.name in LABEL_FILES or is_media(p.name))
            else:
                sources.append(path)
        table = self._common_table(paths)
        return sources if table is None else [*sources, table]

    def build(self, progress: Progress) -> Built:
        """Read the examples, split them unless the files are split already, and encode them."""
        parts = self._read(progress)
        for examples in parts.values():
            if len(examples) == 0:
                raise DataError(f"{examples.where} has no example")
        kinds = {examples.kind: examples.where for examples in parts.values()}
        if len(kinds) > 1:
            got = " and ".join(f"{kind} in {where}" for kind, where in kinds.items())
            raise DataError(f"{self.path}: expected examples of one kind; got {got}")
        (kind,) = kinds
        if self.target == "values" and kind == "image" and not self.sequence:
            raise DataError(f"{self.path} has images: target=values needs sequence=true")
        if kind == "image":
            if self.window:
                raise DataError(f"{self.path} has images: window is for sequences; to resize images, set size")
            parts = encoding.fit_images(parts)
        changes = encoding.describe_changes(parts)
        if len(parts) == 1:
            (examples,) = parts.values()
            fractions = {"val": self.val_fraction, "test": self.test_fraction}
            outputs = encoding.output_names(parts, self.target)
            parts = draw_splits(examples, fractions, self.seed, self.stratify, self.group)
        else:  # a class that occurs only outside of train is an error
            if self.stratify or self.group:
                raise DataError(
                    f"{self.path} has the splits {', '.join(parts)}: leave out task.stratify and task.group"
                )
            outputs = encoding.output_names({"train": parts["train"]}, self.target)
        if len(outputs) < 2 and self.target in ("class", "positions") and len(parts) > 1:  # else nothing is trained
            raise DataError(f"{self.path}: expected at least two classes; all examples are {', '.join(outputs)}")
        if not outputs:
            raise DataError(f"{self.path}: no example has a label")
        arrays, facts = self._encode(kind, parts)
        for split, examples in parts.items():
            arrays[split]["y"] = encoding.encode_labels(examples, self.target, outputs, facts["length"])
            arrays[split]["names"] = np.array([examples.example_name(i).encode() for i in range(len(examples))])
        if self.window:
            facts |= {"length": self.window, "hop": self.hop or self.window}
            for split in parts:
                arrays[split] = encoding.cut_windows(
                    arrays[split], self.window, facts["hop"], self.target == "positions"
                )
        if self.target != "class":
            facts |= {"target": self.target, "metric": FORMATS[self.target].metric}
        columns = {"label_column": self.label_column, "text_column": self.text_column}  # as prediction reads tables
        columns |= {"group_column": self.group} if self.group and kind not in ("audio", "image") else {}
        facts |= columns | ({"changes": changes} if changes else {})
        return arrays, {"classes": outputs, "kind": kind, **facts}

    def _read(self, progress: Progress) -> dict[str, Examples]:
        count = ProgressCounter(progress)
        parts: dict[str, Examples] = {}
        paths = self._paths()
        source = self._common_table(paths)
        common = None if source is None else read_labels(source, self._columns)
        for split, path in paths.items():
            if path.is_file() and suffix(path) == ".npz":
                arrays = read_npz(path, target=self.target, group=self.group)
                if split != "all" and "all" not in arrays:
                    raise DataError(f"{path} has arrays of {', '.join(arrays)}; expected x and y: its name is {split}")
                parts |= arrays if split == "all" else {split: arrays["all"]}
            else:
                parts[split] = self._read_path(path, count, common, alone=len(paths) == 1)
        if common is not None:
            common.check_all_used(self.path)
        if len(parts) > 1 and "train" not in parts:
            raise DataError(f"{self.path} has {', '.join(parts)}; expected train too")
        return parts

    @property
    def _columns(self) -> Columns:
        return Columns(self.label_column, self.text_column, target=self.target, group=self.group)

    def _paths(self) -> dict[str, Path]:
        return split_paths(self.path, self.cache_root())

    def _common_table(self, paths: Mapping[str, Path]) -> Path | None:
        """Return the table with the labels of all splits: the option's, or the one beside their folders or archives."""
        root, others = Path(self.path).expanduser(), [p for p in paths.values() if not holds_media(p)]
        if not self.labels:
            beside = find_table(root) if root.is_dir() and not others and root not in paths.values() else None
            return beside if isinstance(beside, Path) else None
        if others:
            raise DataError(f"labels={self.labels} is for recordings and images; {others[0]} has its own labels")
        table = Path(self.labels).expanduser()
        if not table.exists():
            raise MissingData(f"labels={self.labels} does not exist: looked for {table.absolute()}")
        return table

    def _read_path(self, path: Path, count: ProgressCounter, common: LabelTable | None, alone: bool) -> Examples:
        if holds_media(path):
            return self._read_media(path, count, common, alone)
        if suffix(path) in (".csv", ".tsv"):
            return read_table(path, self._columns)
        if suffix(path) in (".jsonl", ".jsonl.xz"):
            return read_jsonl(path, self._columns)
        raise DataError(f"unknown kind of file {path}; expected {', '.join((*TABLES, *ARCHIVES))} or a folder")

    def _read_media(self, path: Path, count: ProgressCounter, common: LabelTable | None, alone: bool) -> Examples:
        """Return the recordings or images of a part, labelled by its own table, the common one, or its folders."""
        if self.target == "positions":
            raise DataError(f"{path} is for recordings or images; target=positions needs texts, tokens or values")
        source = None if self.labels else find_table(path)
        table = common if source is None else read_labels(source, self._columns)
        if table is None and self.target != "class":
            tables = ", ".join(LABEL_FILES)
            raise DataError(f"{path} has no table of labels ({tables}), which target={self.target} needs")
        examples = read_media(path, self.sample_rate, self.grey, self.size, count, classes=table is None)
        if table is not None:
            part = f"{path.name.removesuffix(suffix(path))}/"
            examples = table.apply(examples, ("",) if table is not common else (part, "") if alone else (part,))
            if table is not common:
                table.check_all_used(path)
        elif path.is_dir():
            for folder in class_folders(path, self.cache_root()):
                if folder.name not in examples.labels:
                    raise DataError(f"{folder} has no {', '.join(MEDIA)} file; expected some of this class")
        return examples

    def _encode(self, kind: str, parts: dict[str, Examples]) -> encoding.Encoded:
        if kind in UNITS and not (self.length or self.window):
            encoding.check_longest(parts, UNITS[kind])
        if kind == "text":
            return encoding.encode_text(parts, self.length)
        if kind == "tokens":
            return encoding.encode_tokens(parts, self.length, self.cut)
        if kind == "values":
            return encoding.encode_values(parts, self.length, self.cut)
        if kind == "audio":
            return encoding.encode_audio(parts, self.length, self.cut, self.sample_rate)
        return encoding.encode_images(parts, self.length, self.sequence)
