"""Which values of a file are black and white, and which of its bands are the model's channels."""

import io
import struct
import zlib

import cv2
import numpy as np
import pytest
from PIL import Image

from tests.helpers.image_formats import HEIGHT, WIDTH, pattern, saved, seen, tiff, whole
from visionattn.data.formats import (
    DAMAGED_IMAGE,
    NotAsAsked,
    ReadOptions,
    open_image,
    read_image,
    settle,
)
from visionattn.data.geometry import Box, Geometry
from visionattn.data.sources import Files


def test_bits_that_a_file_states_are_white_at_their_largest_value(tmp_path):
    twelve = pattern(1, np.uint16, 4095)
    stated = {
        "largest value of a TIFF": tiff(twelve, extratags=[(281, 3, 1, 4095, True)]),
        "sBIT of a PNG, unscaled": png_with_bits(twelve, 12),
        "sBIT of a PNG, scaled": png_with_bits(twelve << 4 | twelve >> 8, 12),
    }
    for kind, stream in stated.items():
        got = seen(stream, channels=1)
        assert got.dtype == np.float32, kind
        np.testing.assert_allclose(got, twelve / 4095, atol=1e-6, err_msg=kind)


def png_with_bits(pixels, bits):
    """A PNG of 16 bits with the chunk sBIT, which Pillow does not write."""
    content = saved(pixels, "png").getvalue()
    body = b"sBIT" + bytes([bits])
    chunk = struct.pack(">I", 1) + body + struct.pack(">I", zlib.crc32(body))
    return io.BytesIO(content[:33] + chunk + content[33:])


def test_a_jpeg_2000_states_its_bits_and_is_decoded_smaller():
    imagecodecs = pytest.importorskip("imagecodecs")
    ramp = np.linspace(0, 4000, 64 * 96).reshape(64, 96).astype(np.uint16)
    options = dict(bitspersample=12, level=0, reversible=True, resolutions=5)
    content = imagecodecs.jpeg2k_encode(ramp, **options)
    with open_image(io.BytesIO(content)) as reader:
        assert (reader.bits, reader.dtype) == (12, np.uint16)
        assert reader.read(Box(0, 0, 64, 96), 16, 24).shape == (16, 24, 1)
        np.testing.assert_array_equal(whole(reader)[..., 0], ramp)
    got = seen(io.BytesIO(content), channels=1)[..., 0]
    np.testing.assert_allclose(got, ramp / 4095, atol=1e-6)


def test_colours_of_16_bits_in_a_png_keep_all_their_bits(capfd):
    """OpenCV writes them, blue first."""
    pixels = pattern(3, np.uint16)
    content = cv2.imencode(".png", np.ascontiguousarray(pixels[..., ::-1]))[1].tobytes()
    got = seen(io.BytesIO(content), value_range=(0, 65535))
    np.testing.assert_allclose(got, pixels / 65535, atol=1e-6)
    garbled = bytearray(content)
    garbled[len(garbled) // 2] ^= 255
    for damaged in (content[:-300], bytes(garbled)):
        with pytest.raises(DAMAGED_IMAGE):
            seen(io.BytesIO(damaged), value_range=(0, 65535))
    assert capfd.readouterr().err == ""  # of libpng


def test_values_become_fractions_of_the_range_and_are_clipped_to_it():
    pixels = np.array([[-5.0, 0.0, 2.0], [3.0, np.nan, np.inf]], np.float32)[..., None]
    got = seen(tiff(pixels), channels=1, value_range=(-1, 3))
    np.testing.assert_allclose(got[..., 0], [[0, 0.25, 0.75], [1, 0, 1]])
    for dtype in ("float32", "uint16"):
        said = f"^{dtype} values from 0 to 900, and nothing says which .*; give --data.value_range"
        with pytest.raises(NotAsAsked, match=said):
            seen(tiff(pattern(1, np.uint16, 900).astype(dtype)))


def test_bands_are_picked_in_the_order_given_or_are_one_line():
    pixels = pattern(5)
    for bands in ((5, 2), (1,), (3, 3, 1)):
        got = seen(tiff(pixels), bands=bands)
        np.testing.assert_array_equal(got, pixels[..., [band - 1 for band in bands]])
    for bands, wanted, line in (
        (1, (1, 2), "wanted band 2, the image has 1 band"),
        (2, None, "the image has 2 bands; name those to read, in their order, as in --data.bands"),
    ):
        with pytest.raises(NotAsAsked, match=f"^{line}[^\n]*$"):
            seen(tiff(pattern(bands)), bands=wanted)
    # of four bands the first three are the colours, the fourth is transparency or infrared
    four = pattern(4)
    np.testing.assert_array_equal(seen(tiff(four)), four[..., :3])


VIEW = Geometry("native", None).view(HEIGHT, WIDTH)


class Listed:
    """Streams as a source of images."""

    def __init__(self, *streams):
        self.contents = [stream.getvalue() for stream in streams]

    def open(self, index):
        return io.BytesIO(self.contents[index])

    def name(self, index):
        return f"image {index}"


@pytest.mark.parametrize(("largest", "bits"), [(4095, 12), (4096, 14), (16384, 16), (17, 8)])
def test_the_range_of_16_bits_is_found_once_by_the_largest_value_of_a_few_files(largest, bits):
    pixels = [pattern(1, np.uint16, high) for high in (5, largest, 11)]
    source = Listed(*map(tiff, pixels))
    options, lines = settle(source, range(3), ReadOptions(1))
    assert options.value_range == (0, 2**bits - 1)
    assert lines == [
        f"16-bit images hold values up to {largest:,}: read as {bits} bits; "
        "--data.value_range LOW HIGH says otherwise"
    ]
    with open_image(source.open(0)) as reader:
        got = read_image(reader, VIEW, options)
    np.testing.assert_allclose(got, pixels[0] / (2**bits - 1), atol=1e-6)


def test_other_values_than_those_of_the_range_that_was_found_are_an_error():
    options = settle(Listed(tiff(pattern(1, np.uint16, 4000))), [0], ReadOptions(1))[0]
    assert options.value_range == (0, 4095)
    for pixels, said in (
        (pattern(1, np.uint16, 5000), "values up to 5,000, where those of the other images end"),
        (pattern(1, np.uint8, 3).astype(np.float32) / 4, "^float32 values from 0 to 0.75, and not"),
        (
            pattern(1, np.uint8, 90).astype(np.int16) - 7,
            "^values from -7, where those of the",
        ),
    ):
        with open_image(tiff(pixels)) as reader, pytest.raises(NotAsAsked, match=said):
            read_image(reader, VIEW, options)
    # What a file states comes first.
    stated = pattern(1, np.uint16, 16383)
    with open_image(tiff(stated, extratags=[(281, 3, 1, 16383, True)])) as reader:
        np.testing.assert_allclose(read_image(reader, VIEW, options), stated / 16383, atol=1e-6)


def test_a_range_is_not_looked_for_where_it_is_given_or_all_images_have_8_bits():
    eight, sixteen = saved(pattern(), "png"), tiff(pattern(1, np.uint16))
    for source, options in (
        (Listed(eight, eight), ReadOptions()),
        (Listed(sixteen), ReadOptions(value_range=(0, 9))),
        (Listed(io.BytesIO(b"no image")), ReadOptions()),
    ):
        assert settle(source, range(len(source.contents)), options) == (options, [])


def test_one_file_of_pages_among_many_is_told(tmp_path):
    for number in range(40):
        Image.new("L", (9, 8), number).save(tmp_path / f"{number:02}.tif")
    pages = [Image.new("L", (9, 8), number) for number in range(3)]
    pages[0].save(tmp_path / "03.tif", save_all=True, append_images=pages[1:])
    files = Files([str(path) for path in sorted(tmp_path.iterdir())])
    _, lines = settle(files, range(40), ReadOptions(1))
    assert len(lines) == 1 and "several pages (3 in" in lines[0] and "03.tif" in lines[0]
    assert settle(files, range(40), ReadOptions(1, page=1))[1] == []
