// The sampling fields of a chat request that the page offers, as a JSON Schema.

const field = (type, description, bounds = {}) => ({ type, description, ...bounds });

export const SAMPLING = {
  type: "object",
  properties: {
    max_tokens: field("integer", "Tokens to generate at most.", { minimum: 1 }),
    temperature: field("number", "0 is greedy; nothing set is greedy too.", { minimum: 0, maximum: 2 }),
    top_p: field("number", "Shortest prefix of the ranked tokens whose mass reaches it.", { minimum: 0, maximum: 1 }),
    top_k: field("integer", "Tokens to sample from; 0 means all.", { minimum: 0 }),
    min_p: field("number", "Tokens less likely than this times the likeliest are not sampled.", { minimum: 0, maximum: 1 }),
    seed: field("integer", "The same request with the same seed gets the same answer.", { minimum: 0 }),
    frequency_penalty: field("number", "Per occurrence of a token in the answer.", { minimum: -2, maximum: 2 }),
    presence_penalty: field("number", "For tokens that the answer has.", { minimum: -2, maximum: 2 }),
    repetition_penalty: field("number", "Above 1, tokens of prompt and answer become less likely.", { exclusiveMinimum: 0, maximum: 2 }),
    min_tokens: field("integer", "No end token before.", { minimum: 0 }),
    stop: {
      type: "array",
      description: "Texts that end the answer.",
      items: { type: "string", minLength: 1 },
      maxItems: 4,
    },
    ignore_eos: field("boolean", "The model's end tokens do not end the answer.", { default: false }),
  },
};
