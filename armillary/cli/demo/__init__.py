"""`armillary demo`: once round the circle on this machine, one module a stage."""
