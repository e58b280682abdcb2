"""`shapes`: pictures of ten kinds of object, drawn, so that everything works without a network."""
import math

import numpy as np

# Which points (x, y), y upwards, lie in the shape; none is farther than 1.07 from the centre
SHAPES = {
    "circle": lambda x, y: x * x + y * y < 0.8 ** 2,
    "ellipse": lambda x, y: x * x + (y / 0.5) ** 2 < 1.05 ** 2,
    "square": lambda x, y: np.maximum(abs(x), abs(y)) < 0.7,
    "triangle": lambda x, y: np.maximum(math.sqrt(0.75) * abs(x) + 0.5 * y, -y) < 0.53,
    "cross": lambda x, y: ((np.minimum(abs(x), abs(y)) < 0.28)
                           & (np.maximum(abs(x), abs(y)) < 0.95)),
    # a pentagram's points lie beyond at most one of its five edge lines
    "star": lambda x, y: sum((x * math.sin(t) + y * math.cos(t) > 0.33).astype(np.int8)
                             for t in 2 * math.pi / 5 * np.arange(5)) < 2,
    "ring": lambda x, y: abs(x * x + y * y - 0.58) < 0.34,
    "crescent": lambda x, y: (x * x + y * y < 1) & ((x - 0.5) ** 2 + y * y > 0.75 ** 2),
    "heart": lambda x, y: (((1.3 * x) ** 2 + (1.3 * y + 0.1) ** 2 - 1) ** 3
                           < (1.3 * x) ** 2 * (1.3 * y + 0.1) ** 3),
    "arrow": lambda x, y: np.where(y > 0, y + abs(x) < 1, (abs(x) < 0.32) & (y > -1)),
}


def _texture(rng, n, size):
    """float32 (n, size, size, 3) around 0: noise, interpolated, of three grains."""
    out = np.zeros((n, size * size, 3), np.float32)
    for cells, strength in ((2, 0.085), (5, 0.055), (11, 0.04)):    # cells per side
        at = np.linspace(0, cells - 1, size)
        weights = np.maximum(0, 1 - abs(at[:, None] - np.arange(cells))).astype(np.float32)
        grid = rng.standard_normal((n, cells * cells, 3), np.float32)
        out += strength * (np.kron(weights, weights) @ grid)
    return out.reshape(n, size, size, 3)


def _cover(rng, is_inside, m, size):
    """The share of each pixel that an object of random place, tilt and size covers: (m, H, W)."""
    grid = (np.arange(4 * size, dtype=np.float32) + 0.5) / 4    # 4 x 4 points in each pixel
    radius = rng.uniform(0.32, 0.44, m).astype(np.float32) * size
    reach = 1.07 * radius
    centre = reach + rng.random((2, m), np.float32) * (size - 2 * reach)
    angle = rng.uniform(-math.pi / 9, math.pi / 9, m)       # 20 degrees: a heart stays a heart
    cos, sin = (np.stack([np.cos(angle), np.sin(angle)]) / radius).astype(np.float32)
    dx, dy = grid - centre[0][:, None], centre[1][:, None] - grid       # (m, 4 size); y upwards
    x = (cos[:, None] * dx)[:, None] + (sin[:, None] * dy)[:, :, None]  # (m, row, column)
    y = (cos[:, None] * dy)[:, :, None] - (sin[:, None] * dx)[:, None]
    return is_inside(x, y).reshape(m, size, 4, size, 4).mean((2, 4), dtype=np.float32)


def _grounds(rng, m, size):
    """Background and object, each as if it filled the picture: two of (m, size, size, 3)."""
    # a colour for the background, and the first of seven that stands out, else the best
    colours = rng.uniform(0.1, 0.9, (m, 8, 3)).astype(np.float32)
    distance = np.linalg.norm(colours[:, 1:] - colours[:, :1], axis=-1)
    choice = 1 + np.argmax(np.where(distance > 0.6, 2, distance), 1)
    back, front = colours[:, 0], colours[np.arange(m), choice]
    return [shade[:, None, None] + _texture(rng, m, size) for shade in (back, front)]


def draw_shapes(n, seed, size=32):
    """Images uint8 (n, size, size, 3), labels int64 (n,), masks uint8 (n, size, size) of 0 and 1.
    One whole object an image, of random place, tilt, colour and size. Colours and texture have the
    background's distribution, so that only the outline tells the class."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(n) % len(SHAPES))
    images = np.empty((n, size, size, 3), np.uint8)
    masks = np.empty(images.shape[:3], np.uint8)
    for label, is_inside in enumerate(SHAPES.values()):
        for rows in np.array_split(np.flatnonzero(labels == label), max(1, n // 500)):
            cover = _cover(rng, is_inside, len(rows), size)
            back, front = _grounds(rng, len(rows), size)
            image = back + cover[..., None] * (front - back)
            image += 0.04 * rng.standard_normal(image.shape, np.float32)
            images[rows] = (255 * image.clip(0, 1)).round()
            masks[rows] = cover >= 0.5
    return images, labels, masks
