"""Ways of getting ringformer wrong, each with the test that must fail of it."""
