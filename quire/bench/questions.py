"""Twenty short questions that benchmarks ask a model in a chat. Imports nothing, so that `--help` stays light."""

QUESTIONS = (
    "Why is the sky blue?",
    "Name three rivers in Europe.",
    "What is 12 + 30?",
    "Write a haiku about rain.",
    "Who wrote Hamlet?",
    "Explain gravity to a child.",
    "List the planets.",
    "What do bees make?",
    "Translate 'good morning' into French.",
    "How do I boil an egg?",
    "What is a prime number?",
    "Give me a synonym for happy.",
    "What year did World War II end?",
    "Describe a cat in one sentence.",
    "Why do leaves fall?",
    "What is the capital of Japan?",
    "Tell me a short joke.",
    "What is Python used for?",
    "How many legs has a spider?",
    "Say something in Latin.",
)
