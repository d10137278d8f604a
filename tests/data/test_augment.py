"""What other laboratories do to a picture, against Pillow and SciPy."""

from __future__ import annotations

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from data_prep import synthetic
from pbs_jax.data import augment
from pbs_jax.data.augment import Acquisition, acquire


@pytest.fixture(scope="module")
def cell() -> np.ndarray:
    """float32[1, 96, 96, 3] of a drawn cell."""
    picture = Image.fromarray(next(synthetic.cells(10)).image).resize((96, 96))
    return np.asarray(picture, np.float32)[None]


def test_no_limits_leave_pictures_as_they_are(cell: np.ndarray) -> None:
    assert np.array_equal(acquire(jnp.asarray(cell), jax.random.key(0), Acquisition()), cell)


def test_compression_is_jpegs_at_quality_50(cell: np.ndarray) -> None:
    grey = np.round(cell[..., :1].repeat(3, axis=-1))
    file = io.BytesIO()
    Image.fromarray(grey[0, ..., 0].astype(np.uint8)).save(file, "jpeg", quality=50)
    expected = np.asarray(Image.open(file), np.float32)
    found = np.asarray(augment._compressed(jnp.asarray(grey), jnp.ones(1)))[0, ..., 0]
    assert np.abs(grey[0, ..., 0] - expected).max() > 10
    # Coefficients halfway between two steps may round either way, so: nearly all pixels, not each.
    assert np.quantile(np.abs(found - expected), 0.9) <= 0.75


def test_compression_names_a_side_it_cannot_cut(cell: np.ndarray) -> None:
    with pytest.raises(ValueError, match="a side of 90 px"):
        acquire(jnp.asarray(cell[:, :90, :90]), jax.random.key(0), Acquisition(compression=1.0))


def test_blur_is_a_gaussian(cell: np.ndarray) -> None:
    sigma = jnp.full((1, 1, 1, 1), 1.25)
    expected = ndimage.gaussian_filter(cell[0], (1.25, 1.25, 0), mode="nearest", radius=(augment.BLUR_TAPS,) * 2 + (0,))
    np.testing.assert_allclose(augment._blurred(jnp.asarray(cell), sigma)[0], expected, atol=1e-3)


def test_stain_changes_what_is_stained_and_not_empty_glass(cell: np.ndarray) -> None:
    glass = cell.copy()
    glass[0, :8] = 255
    found = np.asarray(acquire(jnp.asarray(glass), jax.random.key(1), Acquisition(stain=0.3)))
    np.testing.assert_allclose(found[0, :8], 255, atol=1e-3)
    assert np.abs(found - glass).max() > 10


def test_each_picture_draws_its_own_strength(cell: np.ndarray) -> None:
    copies = jnp.asarray(cell.repeat(8, axis=0))
    for limits in (Acquisition(stain=0.2), Acquisition(blur=1.5), Acquisition(compression=1.0)):
        found = np.asarray(acquire(copies, jax.random.key(0), limits))
        assert np.ptp(found, axis=0).max() > 5
