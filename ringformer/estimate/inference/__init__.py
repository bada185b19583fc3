"""The estimate of inference: prefill, decode step and loading, compiled for absent hardware."""
