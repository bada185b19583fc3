"""What reproduces the paper's tables and figures, and what nothing else imports."""
