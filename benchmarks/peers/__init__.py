"""Other projects' dispatch and combine beside MoonEP's: `python -m benchmarks.peers`. Off by default; see README.md.

One module per peer. Its project is only imported in the ranks, when the peer is made.
"""
