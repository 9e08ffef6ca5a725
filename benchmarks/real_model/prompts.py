"""Twenty beginnings of texts: natural language, code, Japanese, emoji."""

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village at the edge of the forest, there lived",
    "The main difference between a virus and a bacterium is that",
    "In 1969, Neil Armstrong became the first human being to",
    "To bake a good loaf of bread you need flour, water, salt and",
    "My grandmother used to say that patience is",
    "Dear Sir or Madam,\n\nI am writing to complain about the train that",
    "Photosynthesis is the process by which plants",
    "def fibonacci(n):\n    ",
    "import json\n\nwith open('data.json') as file:\n    data = json.load(file)\n\nfor item in data:\n    ",
    "SELECT name, COUNT(*) FROM orders\nWHERE",
    "#include <stdio.h>\n\nint main(void) {\n    int sum = 0;\n    for (int i = 0; i < 10; i++) {\n",
    "<html>\n<head>\n<title>My page</title>\n</head>\n<body>\n",
    "日本の首都は東京です。京都は",
    "吾輩は猫である。名前はまだ",
    "こんにちは、私の名前は田中です。",
    "すもももももももものうち。この文は",
    "🎉🎂 Happy birthday! 🎈 I hope that you",
    "I ❤️ pizza 🍕 and pasta 🍝, but above all I like",
    "👩‍🔬 The scientist 🔬 looked at the 🌍 and said: ",
)
