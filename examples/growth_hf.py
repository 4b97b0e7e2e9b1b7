"""Growth inside a Hugging Face Trainer (pip install 'meristem[hf]'): the same model and data as growth_pytorch.py."""

import os
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments

from meristem import Decoder, Grower, Plan, Sgt
from meristem.integrations import GrowthCallback, HfModel

STEPS = 120
sources = sorted(Path(os.__file__).parent.glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8).long()

plan = Plan.uniform(layers=4, width=64, heads=4, vocabulary=256, context=64)
policy = Sgt(total_steps=STEPS, passes=2, start=20, window=20)
model = Decoder(policy.prepare(plan), seed=0)
growth = GrowthCallback(Grower(model, policies=[policy]))

windows = text.unfold(0, plan.context, plan.context)
arguments = TrainingArguments(
    "runs/growth-hf",
    max_steps=STEPS,
    per_device_train_batch_size=8,
    learning_rate=3e-3,
    weight_decay=0.1,  # of matrices: the callback keeps it from the gates of loops
    save_steps=60,
    logging_steps=60,
)
trainer = Trainer(
    HfModel(model),  # takes input_ids, attention_mask and labels
    arguments,
    train_dataset=[{"input_ids": window, "labels": window} for window in windows],  # moved by one inside
    callbacks=[growth],
)
trainer.train()  # an interrupted run goes on exactly with trainer.train(resume_from_checkpoint=True)

for event in growth.events:
    print(f"step {event['step']}: {event['action']}, layer {event['layer']}, heads {event['heads']}")
print(f"layers with loops: {model.plan.loops}")
