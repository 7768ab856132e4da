"""RoutePack: from a sealed window of routing replay to an expert placement and a trajectory schedule.

    demand -> placement -> rows -> seeds -> search -> WindowPlan

``plan_window`` is the whole flow; every step is a module of its own, named after what it decides.
"""
