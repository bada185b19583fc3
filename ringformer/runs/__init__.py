"""What a run is: its config, identity, record, metrics and folder."""
