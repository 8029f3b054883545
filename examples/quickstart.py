"""Ten lines: four questions at once, answered faster and exactly as by plain `generate`. Run `make setup` first."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_dcut

model = AutoModelForCausalLM.from_pretrained("models/smollm2-135m-instruct", dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained("models/smollm2-135m-instruct")
drafter = hf_dcut.AutoDrafter.from_pretrained("examples/drafter")
questions = ["What is 12 times 7?", "Name three primes.", "What is the capital of France?", "Count from 1 to 12."]
chats = [[{"role": "user", "content": question}] for question in questions]
texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
out = model.generate(
    **inputs, assistant_model=drafter, dcut=True, max_new_tokens=64, do_sample=False, return_dict_in_generate=True
)
plain = model.generate(**inputs, max_new_tokens=64, do_sample=False)
print(tokenizer.batch_decode(out.sequences[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print("equal to plain generate:", torch.equal(out.sequences, plain))
print(out.stats)
