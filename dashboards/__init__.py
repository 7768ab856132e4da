"""Dashboards for Grafana, built by code from the metric catalogue, and what goes with them.

``serving``, ``experts``, ``replication`` and ``replay`` are one dashboard each, made of ``panels`` that ask in
``promql`` and stand in the frame of ``boards``; ``build`` writes their JSON to ``grafana/dashboards``. ``queries``
reads it back, for tests and for ``picture``, which draws a dashboard without Grafana. ``prometheus`` holds the scrape
configuration and the rules.
"""
