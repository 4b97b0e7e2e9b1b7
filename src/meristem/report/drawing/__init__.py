"""How every picture is drawn: elements of SVG, colours, scales, plotting areas with axes, panels over each other."""
