"""The page of ``visionattn look``, in the style of the report: images with what was drawn over
them. It knows nothing of models.

Each figure is shown small and leads to its whole picture, a file beside the page.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import jinja2
from markupsafe import Markup

import visionattn
from visionattn.lab.charts import page_colours
from visionattn.lab.report.page import resource


def look_page(title: str, parts: Sequence[dict[str, Any]]) -> str:
    """Return the page as text.

    Args:
        title: its heading.
        parts: one for each image: ``title``, ``lines`` of text, and ``figures``, each of which has
            ``title``, ``lines``, ``file`` (beside the page), ``source`` and ``details`` (data
            addresses).
    """
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(resource("look.html")).render(
        title=title,
        written=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        version=visionattn.__version__,
        style=Markup(page_colours() + resource("page.css")),
        parts=parts,
    )
