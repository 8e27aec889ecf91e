"""Mode auto: each round's verify width is chosen among a few widths, the chain among them, by measured cost and
acceptance seen so far.
"""
