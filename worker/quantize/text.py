"""Plain English of several kinds, some six hundred words, on which a model's predictions are
compared.
"""

PASSAGES = (
    "The harbour wakes before the town does. At four in the morning the first boats come in, and the men on the "
    "quay pass crates of ice and fish from hand to hand without a word. By seven the market has opened, and by "
    "nine it is almost over: what is left goes to the restaurants on the hill, or to the cats. My grandfather "
    "worked here for forty years. He used to say that the sea pays well, but never on the day on which it "
    "promised to.",
    "Water boils at one hundred degrees Celsius at sea level, and at a lower temperature in the mountains, "
    "because the pressure of the air decreases with height. On the top of a mountain of three thousand metres it "
    "boils at about ninety degrees, so potatoes take longer to cook there. A pressure cooker does the opposite: "
    "it keeps the steam inside, the pressure rises, and the water becomes hotter than one hundred degrees before "
    "it boils.",
    "To make a simple bread, mix five hundred grams of flour with ten grams of salt and a small spoon of dry "
    "yeast. Add three hundred and fifty grams of warm water and stir until no dry flour is left. Cover the bowl "
    "and let it rest for an hour. Fold the dough a few times, shape it into a ball, and let it rest again. Then "
    "bake it in a hot oven for about forty minutes, until the crust is dark brown and the loaf sounds hollow when "
    "you knock on it.",
    "def is_prime(number):\n"
    "    if number < 2:\n"
    "        return False\n"
    "    divisor = 2\n"
    "    while divisor * divisor <= number:\n"
    "        if number % divisor == 0:\n"
    "            return False\n"
    "        divisor += 1\n"
    "    return True\n"
    "\n"
    "\n"
    "def primes_below(limit):\n"
    "    return [number for number in range(limit) if is_prime(number)]\n"
    "\n"
    "\n"
    'if __name__ == "__main__":\n'
    "    print(primes_below(100))\n",
    "Question: What is the capital of France? Answer: The capital of France is Paris. Question: Which planet is "
    "closest to the sun? Answer: Mercury is the planet closest to the sun. Question: How many legs does a spider "
    "have? Answer: A spider has eight legs. Question: Who wrote Romeo and Juliet? Answer: Romeo and Juliet was "
    "written by William Shakespeare. Question: What is twelve times twelve? Answer: Twelve times twelve is one "
    "hundred and forty-four.",
    "Dear Mrs. Miller, thank you for your letter of the third of May. We are sorry to hear that the lamp which "
    "you ordered from us arrived with a broken shade. A new one has left our warehouse today and should reach you "
    "before the end of the week. You need not send the old one back. Please accept our apologies for the trouble, "
    "and let us know if there is anything else that we can do for you. Yours sincerely, the customer service "
    "team.",
    "When the railway came to the valley, the people of the upper villages did not believe that it would stay. "
    "They had seen roads washed away by the river, and bridges carried off by the ice. But the engineers had "
    "built the line high above the water, through seven tunnels, and in the first winter not a single train was "
    "cancelled. Within ten years the old coaching inns had closed, and the young men went to work in the "
    "factories of the city.",
)
