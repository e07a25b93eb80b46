"""What a run is told: the flow's parameters (sections), the machine's settings, and how recipes are resolved."""
