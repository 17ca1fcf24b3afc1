"""Render HTML pages from the templates of this folder, with one style for all pages."""

from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

import visionattn
from visionattn.lab.charts import page_colours


def look_page(title: str, parts: Sequence[dict[str, Any]]) -> str:
    """Return the page of ``visionattn look`` as text: attribution maps of images.

    Each is a thumbnail that links to the full picture, a file in the folder of the page.

    Args:
        title: heading of the page.
        parts: one for each image: ``title``, ``lines`` of text, and ``figures``. Each figure has
            ``title``, ``lines``, ``file`` (in the folder of the page), ``source`` and ``details``
            (data URLs).
    """
    return render("look.html", title=title, parts=parts)


def render(template: str, **values: Any) -> str:
    """Return a page as text. All ``values`` except ``Markup`` are escaped."""
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FunctionLoader(resource),
    )
    return environment.get_template(template).render(
        written=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        version=visionattn.__version__,
        style=Markup(page_colours() + resource("page.css")),
        **values,
    )


def resource(name: str) -> str:
    """Return the text of a file of this folder."""
    return files("visionattn.lab.report").joinpath(name).read_text(encoding="utf-8")
