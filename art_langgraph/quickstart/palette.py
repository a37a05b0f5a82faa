"""The colours of the report: told apart by people with any kind of colour vision (after Okabe and
Ito's palette), on light and on dark, and never the only sign of what they mean.
"""

REWARD = "#0072B2"
AFTER = "#009E73"
BEFORE = "#D55E00"
PARTS = ("#CC79A7", "#E69F00", "#8577E6", "#8A8A8A", "#A5803F", "#56B4E9")
"""In the order of the reward's parts, again from the first where there are more."""


def part_color(index: int) -> str:
    """The colour of the reward's part number `index`."""
    return PARTS[index % len(PARTS)]
