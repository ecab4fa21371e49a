"""What a run does besides its steps, at named moments."""
