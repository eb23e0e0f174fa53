"""Pathfinder images: statistics of the original generator, and images redrawn from their records without tables."""

import dataclasses
import math
import threading
import zlib

import numpy as np
import pytest

pytest.importorskip("numba")
pytest.importorskip("PIL")

from PIL import Image, ImageDraw

from mrconv.tasks.generators.pathfinder_images import generate
from mrconv.tasks.generators.pathfinder_options import PathfinderOptions, options_for
from mrconv.tasks.generators.pathfinder_tables import DEGREES, make_tables


@pytest.fixture(scope="module")
def small():
    return generate(600, seed=1)


@pytest.fixture(scope="module")
def large():
    return generate(24, size=128, seed=1)


def assert_same(a, b):
    for field in dataclasses.fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def part(images, at):
    return type(images)(*(getattr(images, field.name)[at] for field in dataclasses.fields(images)))


def test_bytes_do_not_depend_on_workers(small, large):
    assert_same(generate(600, seed=1, workers=1), small)
    assert_same(generate(600, seed=1, workers=3), small)
    assert_same(generate(10, size=128, seed=1, workers=1), part(large, slice(10)))


def test_start_continues_the_same_sequence(small):
    assert_same(generate(200, seed=1, start=300), part(small, slice(300, 500)))


def test_seeds_give_different_images(small):
    assert not np.array_equal(generate(2, seed=2).images, small.images[:2])
    assert len({image.tobytes() for image in small.images}) == 600


def test_images_of_a_seed_do_not_change():
    # a change of these numbers changes the data of every user
    x = generate(50)
    assert x.labels[:10].tolist() == [1, 1, 0, 1, 0, 0, 0, 1, 1, 0]
    assert x.ends[0].tolist() == [[17, 25], [24, 3]]
    assert zlib.crc32(x.images.tobytes()) == 0x47CEFDE3


def test_shapes_and_types(small):
    assert small.images.shape == (600, 32, 32)
    assert small.images.dtype == small.labels.dtype == np.uint8
    assert small.paths.shape == (600, 2, 14, 2, 2)
    assert small.distractor_paths.shape == (600, 5, 4, 2, 2)
    np.testing.assert_array_equal(small.paths[:, :, 0, 0], small.tails)
    np.testing.assert_array_equal(small.paths[:, :, -1, 1], small.ends)


def test_every_image_is_stretched_to_the_full_range(small, large):
    for x in (small, large):
        assert (x.images.min((1, 2)) == 0).all()
        assert (x.images.max((1, 2)) == 255).all()


def distance(a, b):
    return np.linalg.norm(a.astype(float) - b, axis=-1).mean()


def quadrants(x):
    half = x.shape[1] // 2
    return [part.mean() for rows in (x[:, :half], x[:, half:]) for part in (rows[..., :half], rows[..., half:])]


def test_statistics_at_32(small):
    # of 4,000 images of the original (contours: 200); tolerances are about four standard errors of the difference
    x = small.images
    assert small.labels.mean() == pytest.approx(0.5, abs=0.08)
    assert x.mean() == pytest.approx(20.18, abs=0.4)
    assert x.std() == pytest.approx(51.09, abs=0.6)
    for label in (0, 1):
        assert x[small.labels == label].mean() == pytest.approx(20.18, abs=0.5)
    shares = [100 * (x > value).mean() for value in (0, 64, 128)]
    np.testing.assert_allclose(shares, [34.1, 12.5, 8.5], rtol=0.03)
    assert 100 * (x == 255).mean() == pytest.approx(0.22, abs=0.03)
    np.testing.assert_allclose(
        np.percentile(x.mean((1, 2)), [1, 25, 50, 75, 99]), [16.8, 18.5, 20.0, 21.3, 25.7], atol=0.8
    )
    np.testing.assert_allclose(quadrants(x), [26.4, 19.1, 19.3, 15.8], atol=1.6)
    assert small.attempts.mean() == pytest.approx(322, abs=100)
    assert small.distractors.mean() == pytest.approx(1.16, abs=0.25)
    counts = np.bincount(small.distractors, minlength=4)[:4] / 6
    np.testing.assert_allclose(counts, [26, 40, 26, 8], atol=12)
    assert distance(small.tails[:, 0], small.tails[:, 1]) == pytest.approx(7.05, abs=0.06)
    for c, d, expected in ((0, 0, 12.1), (1, 1, 15.0), (0, 1, 11.9), (1, 0, 13.8)):
        assert distance(small.tails[:, c], small.ends[:, d]) == pytest.approx(expected, abs=1.6)
    np.testing.assert_allclose(small.ends.mean(0), [[18.8, 18.7], [14.8, 14.0]], atol=2.8)


def test_statistics_at_128(large):
    x = large.images
    assert x.mean() == pytest.approx(7.87, abs=0.3)
    assert x.std() == pytest.approx(35.59, abs=0.8)
    shares = [100 * (x > value).mean() for value in (0, 64, 128)]
    np.testing.assert_allclose(shares, [13.7, 4.0, 3.0], rtol=0.05)
    assert 100 * (x == 255).mean() == pytest.approx(0.07, abs=0.02)
    assert large.distractors.mean() == pytest.approx(7.7, abs=0.5)
    assert set(large.margins) == {2, 3}
    assert distance(large.tails[:, 0], large.tails[:, 1]) == pytest.approx(20.0, abs=0.3)
    assert distance(large.tails[:, 0], large.ends[:, 0]) == pytest.approx(72.4, abs=15)
    assert large.tails[:, 0].min() >= 40
    assert large.tails[:, 0].max() <= 85


@pytest.mark.slow
def test_statistics_at_128_of_many():
    x = generate(1500, size=128, seed=3)
    assert x.attempts.mean() == pytest.approx(374, abs=100)
    np.testing.assert_allclose(quadrants(x.images), [9.0, 8.1, 7.7, 6.8], atol=0.6)
    for c, d, expected in ((0, 0, 72.4), (1, 1, 79.3), (0, 1, 69.9), (1, 0, 77.2)):
        assert distance(x.tails[:, c], x.ends[:, d]) == pytest.approx(expected, abs=5)
    np.testing.assert_allclose(x.tails[:, 0].mean(0), [66.9, 68.0], atol=3)
    np.testing.assert_allclose(x.ends.mean(0), [[43.2, 39.1], [42.3, 38.4]], atol=10)


def test_border_quirk_leaves_the_original_angles():
    table = make_tables(options_for(32))
    open_angles = DEGREES[~table.blocked[0]]
    np.testing.assert_array_equal(open_angles, np.arange(-150, -120))
    areas = table.start_area[0, ~table.blocked[0]]
    rows, columns = (areas[:, [1, 3]] - areas[:, [0, 2]] + 1).T
    np.testing.assert_array_equal(rows * columns, [6] * 12 + [9] * 18)
    assert (~make_tables(options_for(128)).blocked).sum(1).tolist() == [354, 360]


def test_border_quirk_starts_contour_a_towards_the_upper_left(small):
    assert small.tails[:, 0].min() >= 14
    assert small.tails[:, 0].max() <= 16
    assert small.angles[:, 0].min() >= -150
    assert small.angles[:, 0].max() <= -121


def test_without_border_quirk_contours_start_in_all_directions():
    x = generate(100, options=dataclasses.replace(options_for(32), border_quirk=False))
    assert len(np.unique(x.angles[:, 0] // 90)) == 4
    assert x.distractors.mean() > 2
    assert x.attempts.mean() < 100


def reachable(x, i):
    """Return the ends of all dashes of image i that are connected to the first disc."""
    dashes = [(c, k) for c in range(2) for k in range(x.paths.shape[2])]
    gap = 2 * int(x.margins[i]) + 3  # 3: rounding
    joined = {dash: [] for dash in dashes}
    for c, k in dashes:
        if (c, k + 1) in joined and math.dist(x.paths[i, c, k, 1], x.paths[i, c, k + 1, 0]) <= gap:
            joined[c, k].append((c, k + 1))
            joined[c, k + 1].append((c, k))
    waiting, seen = [(c, 0) for c in range(2) if (x.paths[i, c, 0, 0] == x.discs[i, 0]).all()], set()
    while waiting:
        dash = waiting.pop()
        if dash not in seen:
            seen.add(dash)
            waiting.extend(joined[dash])
    return {tuple(point) for dash in seen for point in x.paths[i][dash].tolist()}


@pytest.mark.parametrize("size", [32, 128])
def test_contour_joins_the_discs_of_positives_only(size, small, large):
    x = small if size == 32 else large
    meet = (x.ends[:, 0] == x.ends[:, 1]).all(-1)  # the last two dashes may touch, in the original too
    assert meet.mean() < 0.01
    for i in np.flatnonzero(~meet):
        assert (tuple(x.discs[i, 1].tolist()) in reachable(x, i)) == bool(x.labels[i])


@pytest.mark.parametrize(("size", "length"), [(32, 2), (128, 5)])
def test_discs_and_dashes_are_in_the_image(size, length, small, large):
    x = small if size == 32 else large
    each = np.arange(len(x.images))
    assert (np.linalg.norm(x.paths[..., 0, :].astype(float) - x.paths[..., 1, :], axis=-1) <= length + 1.5).all()
    for k in range(2):
        assert (x.images[each, x.discs[:, k, 0], x.discs[:, k, 1]] >= 200).all()
    near, far = x.paths[..., 0, :].astype(float), x.paths[..., 1, :]
    for share in (0, 0.5, 1):
        rows, columns = np.floor(near + share * (far - near)).astype(int).reshape(len(each), -1, 2).T
        around = [x.images[each, (rows + dy) % size, (columns + dx) % size] for dy, dx in offsets(1)]
        assert np.max(around, 0).min() > 40


def move(point, length, angle):
    return math.ceil(point[0] + length * math.sin(angle)), math.ceil(point[1] + length * math.cos(angle))


def offsets(radius):
    reach = range(-int(radius), int(radius) + 1)
    return [(y, x) for y in reach for x in reach if y * y + x * x <= radius * radius]


def dilate(canvas, radius):
    out, n = np.zeros_like(canvas), len(canvas)
    for dy, dx in offsets(radius):
        target = out[max(0, dy) : n + min(0, dy), max(0, dx) : n + min(0, dx)]
        np.maximum(
            target, canvas[max(0, -dy) : n - max(0, dy), max(0, -dx) : n - max(0, dx)][: len(target)], out=target
        )
    return out


def shrink(canvas, side):
    return np.asarray(Image.fromarray(canvas).resize((side, side), Image.Resampling.LANCZOS)) / 255


def paste(square, point, size):
    h = len(square) // 2
    wide = np.zeros((size + 2 * h, size + 2 * h))
    wide[point[0] : point[0] + 2 * h + 1, point[1] : point[1] + 2 * h + 1] = square
    return wide[h:-h, h:-h]


def dash(o, margin, point, angle):
    """Return ink and footprint of a dash as images."""
    h = o.paddle_length + math.ceil(o.paddle_thickness) + margin
    c = h * o.antialias_scale
    image = Image.new("L", (2 * c + 1, 2 * c + 1))
    y, x = move((c, c), o.paddle_length * o.antialias_scale, angle)
    ImageDraw.Draw(image).line([c, c, x, y], fill=255, width=round(o.paddle_thickness * o.antialias_scale))
    ink, canvas = np.asarray(image), dilate(np.asarray(image), margin * o.antialias_scale)
    return tuple(paste(shrink(square, 2 * h + 1), point, o.size) for square in (ink, canvas))


class RedrawnContour:
    """A contour redrawn dash by dash, with assertions of the rules."""

    def __init__(self, o, margin, path, angle):
        self.o, self.margin, self.path = o, margin, path
        self.angle = math.radians(angle)
        tail = tuple(path[0, 0])
        head = move(tail, o.paddle_length, self.angle)
        assert head == tuple(path[0, 1])
        self.pivot = move(head, o.paddle_length + margin, math.radians(angle + 180))
        self.ink, self.pending = dash(o, margin, tail, self.angle)

    def grow(self, k, mask):
        """Redraw dash k; return the mask with dash k - 1."""
        L, m = self.o.paddle_length, self.margin
        self.pivot = move(self.pivot, L + 2 * m, self.angle)
        end = tuple(self.path[k, 1].tolist())
        steps = np.radians(np.arange(0, 360, 360 / (2 * np.pi * (L + m))))
        circle = {
            (int(self.pivot[0] + (L + m) * math.sin(a)), int(self.pivot[1] + (L + m) * math.cos(a))) for a in steps
        }
        assert end in circle
        angle = math.atan2(end[0] - self.pivot[0], end[1] - self.pivot[1])
        turn = abs((angle - self.angle + math.pi) % (2 * math.pi) - math.pi)
        assert turn * self.o.continuity < math.pi / 2
        assert max(mask[end[0] + dy, end[1] + dx] for dy, dx in offsets(m)) < 1
        assert move(end, L, angle + math.pi) == tuple(self.path[k, 0])
        ink, footprint = dash(self.o, m, end, angle + math.pi)
        assert (mask + footprint).max() < 1.8
        mask = np.maximum(mask, self.pending)
        self.angle, self.pending, self.ink = angle, footprint, np.maximum(self.ink, ink)
        return mask


def redraw(x, i, o):
    """Redraw image i from its record, step by step as the original generator."""
    margin, mask = int(x.margins[i]), np.pad(np.zeros((o.size - 2, o.size - 2)), 1, constant_values=1.0)
    a, b = (RedrawnContour(o, margin, x.paths[i, c], int(x.angles[i, c])) for c in range(2))
    for k in range(1, o.contour_length):
        mask = b.grow(k, a.grow(k, mask))
    mask = np.maximum(mask, b.pending)
    canvas = np.maximum(a.ink, b.ink) * (o.snake_contrast * o.paddle_contrast)
    for j in range(x.distractors[i]):
        short = RedrawnContour(o, margin, x.distractor_paths[i, j], int(x.angles[i, 2 + j]))
        for k in range(1, o.distractor_length):
            mask = short.grow(k, mask)
        mask = np.maximum(mask, short.pending)
        canvas = np.maximum(canvas, short.ink * o.snake_contrast)
    scale = o.antialias_scale
    grid = np.arange(o.size * scale)
    for y, x_ in x.discs[i] * scale:
        disc = (grid[:, None] - y) ** 2 + (grid - x_) ** 2 <= (o.marker_radius * scale) ** 2
        canvas = np.maximum(canvas, shrink(disc.astype(np.uint8) * 255, o.size))
    return np.floor((canvas - canvas.min()) * (255 / np.ptp(canvas)) + 0.5)


@pytest.mark.parametrize(("size", "count"), [(32, 40), (64, 6), (128, 6)])
def test_images_can_be_redrawn_from_their_records(size, count):
    x = generate(count, size=size, seed=5)
    for i, image in enumerate(x.images):
        np.testing.assert_array_equal(image, redraw(x, i, options_for(size)))


def test_options_are_those_of_long_range_arena():
    assert options_for(32) == PathfinderOptions()
    o = options_for(128)
    assert (o.seed_distance, o.marker_radius, o.paddle_length, o.paddle_thickness) == (20, 3, 5, 1.5)
    assert (o.paddle_margins, o.continuity, o.snake_contrast, o.paddle_contrast) == ((2, 3), 1.8, 0.9, 1)
    assert (o.contour_length, o.distractor_length, o.num_distractor_snakes) == (14, 4, 8)
    assert options_for(32, contour_length=9).num_distractor_snakes == 6


@pytest.mark.parametrize("size", [33, 48, 96, 200])
def test_other_sizes(size):
    x = generate(2, size=size)
    assert x.images.shape == (2, size, size)
    assert x.images.max() == 255


def test_progress_counts_all_images():
    main, done = threading.get_ident(), []

    def progress(n):
        assert threading.get_ident() == main
        done.append(n)

    generate(300, workers=2, progress=progress)
    assert sum(done) == 300
    assert len(done) > 1


@pytest.mark.parametrize("workers", [1, 2])
def test_interrupt_stops_the_generator(workers):
    done, threads = [], threading.active_count()

    def interrupt(n):
        done.append(n)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(100_000, workers=workers, progress=interrupt)
    assert len(done) == 1
    assert threading.active_count() == threads


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 0}, "count must be"),
        ({"count": 1.5}, "count must be"),
        ({"count": 1, "size": 31}, "size must be at least 32"),
        ({"count": 1, "seed": -1}, "seed must be"),
        ({"count": 1, "seed": 2**64}, "seed must be"),
        ({"count": 1, "start": -1}, "start must be"),
        ({"count": 1, "workers": 0}, "workers must be"),
        ({"count": 1, "size": 128, "options": PathfinderOptions()}, "size must be that of the options, 32; got 128"),
        ({"count": 1, "options": PathfinderOptions(seed_distance=8)}, "size must leave room"),
    ],
)
def test_invalid_arguments_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        generate(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"paddle_thickness": 0.7}, "paddle_thickness . antialias_scale"),
        ({"paddle_margins": ()}, "paddle_margins must be"),
        ({"paddle_margins": (0,)}, "paddle_margins must be"),
        ({"continuity": 0}, "continuity must be"),
        ({"marker_radius": 5}, "marker_radius must be"),
        ({"num_distractor_snakes": -1}, "num_distractor_snakes must be"),
        ({"seed_distance": 1}, "seed_distance must be"),
    ],
)
def test_invalid_options_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        PathfinderOptions(**arguments)


def test_contours_that_cannot_fit_are_reported():
    with pytest.raises(RuntimeError, match="shorter contour_length"):
        generate(1, options=PathfinderOptions(contour_length=80))
