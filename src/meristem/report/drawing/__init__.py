"""How every picture is drawn.

The modules build on one another in this order: `colours` and `numbers`; `scales`, where values lie, and `elements` of
SVG; `frame`, a plotting area with its axes and legend; `panels`, several of these over one another.
"""
