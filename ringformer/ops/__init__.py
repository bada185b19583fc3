"""Mathematics on arrays and axis names: ring attention, blockwise feed-forward, cross-entropy, RoPE, layouts."""

from ringformer.hardware.absent_tpu import leave_absent_tpu_alone

leave_absent_tpu_alone()  # before a backend starts
