"""Reports of estimates: tables, advice and seconds."""
