"""What all pictures share: colours that differ in lightness too, and the look of a legend."""

INK, CALM = "#1f2328", "#6e7781"  # text, and what steps back
KERNEL, PLAIN, BOUND = "#0b5394", "#e0a030", "#1f2328"  # dark, light and black: apart in lightness too
LEGEND = dict(fontsize=8, frameon=False, columnspacing=1.0, borderpad=0.1)
