"""The extension study: a released model, SmolLM2-135M-Instruct, to a longer context, and what each part of that did."""
