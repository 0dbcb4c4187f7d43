"""The acceptance set: everything that a backend has to show on the machine at hand.

`checklist` and `timing` hold the checks; `shares` splits them so that many processes compile at once, `child` is such a
process and `pool` its parent, which survives kernels that crash or hang.
"""
