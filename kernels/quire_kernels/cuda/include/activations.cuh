// The activations of gated layers, by code: 0 silu, 1 gelu, 2 gelu by tanh, 3 clamped_swiglu.
#pragma once

#include <device.cuh>

DEVICE float activate(float x, int activation) {
    if (activation == 0) return x / (1.0f + expf(-x));
    if (activation == 1) return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
    if (activation == 2) return 0.5f * x * (1.0f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
    const float clamped = x > 7.0f ? 7.0f : x;
    return clamped / (1.0f + expf(-1.702f * clamped));
}

// What the activated gate is multiplied by.
DEVICE float factor(float up, int activation) {
    if (activation != 3) return up;
    return 1.0f + (up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up);
}
