"""Networks that tell classes apart, each as a `Model` with logits for outputs."""

from __future__ import annotations

import math

import flax.linen as nn
import jax.numpy as jnp

from fedjax_hk.models.model import Model, from_flax
from fedjax_hk.types import AnyArray, Array

CNN_CHANNELS = {"cnn": ((8, 16), 64), "cnn_large": ((32, 64), 128)}


def classifier(example_inputs: AnyArray, num_classes: int, name: str | None = None) -> Model:
    """The network of that name.

    Args:
      example_inputs: `[B, ...]`, uint8 or float32, for shapes only.
      num_classes: C.
      name: "mlp", "cnn" (8 and 16 channels) or "cnn_large" (32 and 64); None: "cnn" for
        images, "mlp" for flat samples and for images too small to be halved twice.

    Errors: ValueError for a CNN on samples that are no images of 4 x 4 or more.
    """
    shape = tuple(example_inputs.shape[1:])
    images = len(shape) == 3 and min(shape[:2]) >= 4
    name = name or ("cnn" if images else "mlp")
    if name == "mlp":
        return from_flax(MLP(num_classes), example_inputs, (num_classes,))
    if not images:
        raise ValueError(
            f"--model={name}: it needs images of 4 x 4 or more, shape (height, width, channels), "
            f"a sample has shape {shape}; use --model=mlp, or --image_shape for flat images."
        )
    channels, dense_neurons = CNN_CHANNELS[name]
    return from_flax(CNN(num_classes, channels, dense_neurons), example_inputs, (num_classes,))


class MLP(nn.Module):
    """Two hidden ReLU layers on the flattened sample."""

    num_classes: int
    neurons: tuple[int, ...] = (64, 32)

    @property
    def forward_layers(self) -> tuple[tuple[str, str], ...]:
        """Name and kind of each layer, see `Model`."""
        names = [*(f"dense_{index}" for index in range(len(self.neurons))), "output"]
        return tuple((name, "linen_dense") for name in names)

    @nn.compact
    def __call__(self, inputs: Array) -> Array:
        """Maps `[B, ...]` to logits `[B, C]`."""
        hidden = inputs.reshape(inputs.shape[0], math.prod(inputs.shape[1:]))
        for index, neurons in enumerate(self.neurons):
            hidden = nn.relu(nn.Dense(neurons, name=f"dense_{index}")(hidden))
        return nn.Dense(self.num_classes, name="output")(hidden)


class CNN(nn.Module):
    """Layers of 3 x 3 convolution, ReLU and 2 x 2 max pooling, then one hidden layer."""

    num_classes: int
    channels: tuple[int, ...] = (8, 16)
    dense_neurons: int = 64

    @property
    def forward_layers(self) -> tuple[tuple[str, str], ...]:
        """Name and kind of each layer, see `Model`."""
        images = [(f"conv_{index}", "conv") for index in range(len(self.channels))]
        return (*images, ("dense", "linen_dense"), ("output", "linen_dense"))

    @nn.compact
    def __call__(self, inputs: Array) -> Array:
        """Maps `[B, height, width, channels]` to logits `[B, C]`."""
        image = inputs
        for index, channels in enumerate(self.channels):
            image = _halve(nn.relu(Conv(channels, name=f"conv_{index}")(image)))
        hidden = image.reshape(image.shape[0], math.prod(image.shape[1:]))
        hidden = nn.relu(nn.Dense(self.dense_neurons, name="dense")(hidden))
        return nn.Dense(self.num_classes, name="output")(hidden)


class Conv(nn.Module):
    """A 3 x 3 convolution that keeps the size; parameters as those of `flax.linen.Conv`.

    A product with the nine shifted images: where every client has its own kernel, XLA's own
    convolution takes 3 to 5 times as long on a CPU (jax 0.10.2, 8 x 8 and 28 x 28 pixels).
    """

    channels: int

    @nn.compact
    def __call__(self, inputs: Array) -> Array:
        height, width, channels = inputs.shape[1:]
        kernel_shape = (3, 3, channels, self.channels)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), kernel_shape)
        bias = self.param("bias", nn.initializers.zeros, (self.channels,))
        padded = jnp.pad(inputs, ((0, 0), (1, 1), (1, 1), (0, 0)))
        shifted = [padded[:, y : y + height, x : x + width] for y in range(3) for x in range(3)]
        columns = jnp.concatenate(shifted, axis=-1)
        flat = kernel.reshape(9 * channels, self.channels)
        return columns @ flat + bias[None, None, None, :]


def _halve(image: Array) -> Array:
    """2 x 2 max pooling; an odd last row or column is dropped."""
    batch, height, width, channels = image.shape
    even = image[:, : height // 2 * 2, : width // 2 * 2]
    return jnp.max(even.reshape(batch, height // 2, 2, width // 2, 2, channels), axis=(2, 4))
