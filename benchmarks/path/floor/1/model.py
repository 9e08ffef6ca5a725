"""A decoupled model that only sends: one thread, one response per step and open stream, the last with FINAL.

It parses nothing and polls for no cancellation: what a stream costs here is what Triton, its Python stub and
the client cost by themselves. One response for all, made beforehand, is the least: the stub then writes its
tensors into shared memory once. Made anew each time, as a model must whose tokens differ, it is the least
that such a model can do.
"""

import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
INPUTS = ("responses", "tokens", "step_ms", "anew")


class TritonPythonModel:
    def initialize(self, args):
        self.arrived = threading.Event()
        self.new = []
        self.stopped = False
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def execute(self, requests):
        for request in requests:
            values = (pb_utils.get_input_tensor_by_name(request, name) for name in INPUTS)
            self.new.append(
                Stream(request.get_response_sender(), *(one.as_numpy()[0].item() for one in values))
            )
        self.arrived.set()

    def run(self):
        streams = []
        due = 0.0
        while not self.stopped:
            if not streams:
                self.arrived.wait()
            self.arrived.clear()
            while self.new:
                streams.append(self.new.pop(0))
            due = max(due + max((one.step_s for one in streams), default=0.0), time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
            for one in streams:
                one.send()
            streams = [one for one in streams if one.left]

    def finalize(self):
        self.stopped = True
        self.arrived.set()
        self.thread.join(5.0)


class Stream:
    made = {}

    def __init__(self, sender, responses, tokens, step_ms, anew):
        self.sender, self.left, self.step_s, self.anew = sender, responses, step_ms / 1000, anew
        self.arrays = {
            "text_output": np.array([b" word" * tokens], dtype=np.object_),
            "output_ids": np.arange(1000, 1000 + tokens, dtype=np.int32),
            "finish_reason": np.array([b""], dtype=np.object_),
        }
        if tokens not in self.made:
            self.made[tokens] = self.make()
        self.response = self.made[tokens]

    def make(self):
        return pb_utils.InferenceResponse([pb_utils.Tensor(*named) for named in self.arrays.items()])

    def send(self):
        response = self.make() if self.anew else self.response
        self.left -= 1
        if self.left:
            self.sender.send(response)
        else:
            self.sender.send(response, flags=FINAL)
