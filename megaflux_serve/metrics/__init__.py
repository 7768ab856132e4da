"""Metrics for Prometheus: what an operator sees of replication, capture and window planning.

``catalogue`` names them.
"""
