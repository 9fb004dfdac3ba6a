"""`armillary demo`: the complete cycle on this machine, one module per stage."""
