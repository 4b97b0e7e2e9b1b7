"""Pictures of a plan and of a run, drawn as SVG without a plotting library."""
