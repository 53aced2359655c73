# SPDX-License-Identifier: Apache-2.0
"""A well-known trained model, converted once per checkout."""

import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "real_model"

PROSE = """The village lies at the end of a narrow road that follows the river into
the mountains. In winter the road is often closed by snow, and the people who live
there buy enough food in autumn to last until spring. Most of the houses are built of
stone, with small windows and heavy wooden doors that keep the cold out. On Sunday
mornings the baker opens his shop before sunrise, because the farmers come down from
the hills early and want to be home again before their animals have to be fed. A bus
from the town arrives twice a day. The driver knows every passenger by name, and when
somebody is late he waits for a few minutes with the engine running. Tourists come in
July to walk along the old paths and to swim in the lake, which stays cold even in
the middle of summer. When they leave, the village becomes quiet again, and one can
hear the water from almost every room.
""".replace("\n", " ")
"""A text that no model was trained on."""


@cache
def real_model() -> Path:
    """The checkpoint's folder, created on first use in about 10 s."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))  # the examples are scripts
    import convert

    path: Path = convert.checkpoint()
    return path
