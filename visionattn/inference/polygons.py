"""Outlines in files: polygons of classes and boxes as GeoJSON, and objects of classes as COCO JSON.

Places are pixels from the upper left corner of the image, edges included, or in GeoJSON coordinates
of its coordinate system. rasterio is imported only where needed.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import cv2
import numpy as np

from visionattn.data.formats.reader import Georeference
from visionattn.data.geometry import Box
from visionattn.inference.result_files import write_records

Colour = Sequence[int]
"""Red, green and blue, 0 to 255."""


def class_polygons(
    mask: np.ndarray,
    classes: Sequence[int],
    names: Sequence[str],
    colours: Sequence[Colour],
    place: Georeference | None,
) -> Iterator[dict[str, Any]]:
    """Yield a GeoJSON feature for each connected area of a class, holes included.

    Pixels that only share a corner are not connected. Coordinates lie on the edges of pixels.

    Args:
        mask: class of each pixel, uint8 ``[H, W]``.
        classes: the classes that are outlined.
        names, colors: of all classes.
        place: place of the image on the earth; without a ``transform``, coordinates are pixels.
    """
    from rasterio.features import shapes

    there = {"transform": place.transform} if is_placed(place) else {}
    for geometry, value in shapes(mask, mask=np.isin(mask, classes), **there):
        yield feature(geometry["coordinates"], names[int(value)], colours[int(value)])


def feature(rings: Sequence[Any], name: str, colour: Colour, **properties: Any) -> dict[str, Any]:
    """Return a polygon as a GeoJSON feature with the properties that QuPath reads.

    Args:
        rings: the outer ring and holes, each a closed sequence of x and y.
        name: name of its class.
        colour: color of its class.
        properties: further properties.
    """
    known = {"class": name, "objectType": "annotation"}
    known["classification"] = {"name": name, "color": list(colour)}
    geometry = {"type": "Polygon", "coordinates": rings}
    return {"type": "Feature", "geometry": geometry, "properties": known | properties}


def box_feature(
    box: Box, name: str, colour: Colour, place: Georeference | None, **properties: Any
) -> dict[str, Any]:
    """Return a box in pixels of an image as a GeoJSON feature; see ``class_polygons`` and
    ``feature`` for the arguments.
    """
    (top, left), (bottom, right) = box[:2], (box.top + box.height, box.left + box.width)
    ring = [(left, top), (left, bottom), (right, bottom), (right, top), (left, top)]
    if is_placed(place):
        ring = [place.transform @ corner for corner in ring]
    return feature([ring], name, colour, **properties)


def is_placed(place: Georeference | None) -> TypeGuard[Georeference]:
    """Return whether pixels have coordinates; ground control points do not give them exactly."""
    return place is not None and place.transform is not None


def write_geojson(
    path: Path, features: Iterable[dict[str, Any]], place: Georeference | None
) -> None:
    """Write features one after the other, completely or not at all.

    Coordinates stay in the coordinate system of the image: converted, edges would no longer be
    straight. The member ``crs`` of GeoJSON 2008 names the system, unless it is the WGS 84 of
    RFC 7946.
    """
    head: dict[str, Any] = {"type": "FeatureCollection"}
    if is_placed(place) and place.crs:
        code = place.crs.to_epsg()
        name = f"urn:ogc:def:crs:EPSG::{code}" if code else place.crs.to_wkt()
        if code != 4326:
            head["crs"] = {"type": "name", "properties": {"name": name}}
    write_records(path, head, "features", map(json.dumps, features))


def class_objects(mask: np.ndarray, classes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield the connected areas of classes as in ``class_polygons``, as COCO annotations without
    ``id`` and ``image_id``.

    ``segmentation`` holds uncompressed run lengths, which keep holes. Category 1 is class 0.
    """
    for number in classes:
        found = cv2.connectedComponentsWithStats((mask == number).astype(np.uint8), connectivity=4)
        for label, (left, top, width, height, area) in enumerate(found[2][1:].tolist(), 1):
            inside = found[1][:, left : left + width].T.ravel() == label
            changes = np.flatnonzero(np.diff(inside, prepend=False, append=False))
            ends = [0, *(changes + left * len(mask)).tolist(), mask.size]
            yield {
                "category_id": number + 1,
                "bbox": [left, top, width, height],
                "area": area,
                "iscrowd": 0,
                "segmentation": {"size": [*mask.shape], "counts": np.diff(ends).tolist()},
            }


class CocoFile:
    """Objects of many images, written as one COCO file at the end.

    Args:
        names: names of all classes.
        classes: the classes that are written.
    """

    def __init__(self, names: Sequence[str], classes: Sequence[int]):
        self.classes = classes
        self.categories = [{"id": number + 1, "name": names[number]} for number in classes]
        self.images: list[dict[str, Any]] = []
        self.annotations: list[str] = []

    def add(self, name: str, mask: np.ndarray) -> None:
        """Add the objects of an image with its mask, uint8 ``[H, W]``."""
        height, width = mask.shape
        own = {"id": len(self.images) + 1, "file_name": name, "width": width, "height": height}
        self.images.append(own)
        for each in class_objects(mask, self.classes):
            known = {"id": len(self.annotations) + 1, "image_id": own["id"]}
            self.annotations.append(json.dumps(known | each))

    def write(self, path: Path) -> None:
        """Write the file, completely or not at all."""
        head = {"images": self.images, "categories": self.categories}
        write_records(path, head, "annotations", self.annotations)
