"""Reading a picture back."""

from __future__ import annotations

from xml.etree import ElementTree

SVG = "{http://www.w3.org/2000/svg}"
Element = ElementTree.Element


def parsed(svg: str) -> Element:
    return ElementTree.fromstring(svg)


def texts(root: Element) -> list[str]:
    return [node.text or "" for node in root.iter(f"{SVG}text")]


def number(node: Element, name: str) -> float:
    return float(node.get(name, "nan"))


def extent(node: Element) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a text in a wide font; a turned one is taken as upright."""
    size, content = number(node, "font-size"), node.text or ""
    length, height = 0.6 * size * len(content), 0.7 * size
    x, y = number(node, "x"), number(node, "y")
    left = {"start": x, "middle": x - length / 2, "end": x - length}[node.get("text-anchor", "start")]
    if node.get("transform"):
        return x - height / 2, y - length / 2, x + height / 2, y + length / 2
    return left, y - height, left + length, y


def assert_labels_are_inside_and_apart(root: Element) -> None:
    boxes = [(extent(node), node.text) for node in root.iter(f"{SVG}text") if node.text]
    width, height = number(root, "width"), number(root, "height")
    for (left, top, right, bottom), content in boxes:
        assert left >= 0, content
        assert top >= 0, content
        assert right <= width, content
        assert bottom <= height, content
    for i, (a, one) in enumerate(boxes):
        for b, other in boxes[:i]:
            apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
            assert apart, (one, other)
