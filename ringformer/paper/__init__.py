"""The paper's tables and figures, reproduced; nothing imports this room."""
