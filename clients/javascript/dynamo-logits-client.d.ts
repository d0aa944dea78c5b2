/** Types of dynamo-logits-client.js. */

/** One entry of a selection. */
export interface Processor {
  name: string;
  args: Record<string, unknown>;
}

export declare const VERSION: string;

// Section of the catalogue's processors, written by scripts/generate_clients.py; do not edit.
/** A phrase and its bias. */
export interface BiasedSequence {
  /** The phrase as text (text of 1 to 4096 characters). */
  text?: string | null;
  /** The phrase as token ids (list of 1 to 4096 integers 0 to 2147483647). */
  token_ids?: ReadonlyArray<number> | null;
  /** Added to the logit of the token that completes the sequence (number -100 to 100). */
  bias: number;
}

/** Compact JSON that a JSON Schema describes. */
export interface JsonContent {
  /** type */
  type: "json_schema";
  /** A JSON Schema; true allows any JSON (object or true or false). */
  json_schema: Readonly<Record<string, unknown>> | boolean;
}

/** Text that a regular expression matches as a whole. */
export interface RegexContent {
  /** type */
  type: "regex";
  /** Regular expression in the syntax of Rust's regex crate (text of 1 to 1048576 characters). */
  pattern: string;
}

/** One section: its beginning, its content and its end. */
export interface Tag {
  /** Default "tag". */
  type?: "tag";
  /** Begins with one of the triggers (text of 1 to 256 characters). */
  begin: string;
  /** JsonContent or RegexContent. */
  content: JsonContent | RegexContent;
  /** Text behind the content; may be empty (text of 0 to 256 characters). */
  end: string;
}

/** Free text with tags in it. */
export interface TriggeredTags {
  /** type */
  type: "triggered_tags";
  /** Texts that start a tag (list of 1 to 32 texts of 1 to 256 characters). */
  triggers: ReadonlyArray<string>;
  /** The tags (list of 1 to 128 Tag). */
  tags: ReadonlyArray<Tag>;
  /** The answer begins with a tag. Default false. */
  at_least_one?: boolean;
  /** The answer ends behind the first tag. Default false. */
  stop_after_first?: boolean;
}

/** A function that the model may call. */
export interface Tool {
  /** Name of the function (text like ^[A-Za-z0-9_.-]{1,64}$ of 0 to 64 characters). */
  name: string;
  /** JSON Schema of its arguments (object or true or false). Default true. */
  parameters?: Readonly<Record<string, unknown>> | boolean;
}

/** Moves the answer towards its prompt, and away from a negative one (classifier-free guidance). */
export interface CfgArguments {
  /** Guidance scale; 1 would change nothing (number > 1 and ≤ 100). */
  scale: number;
  /** The negative prompt as text (text of 1 to 4096 characters). */
  negative_prompt?: string | null;
  /** The same as token ids (list of 1 to 4096 integers 0 to 2147483647). */
  negative_token_ids?: ReadonlyArray<number> | null;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all";
}

/** Moves the answer away from what a weaker model, the worker's draft model, would say (contrastive decoding). */
export interface ContrastiveArguments {
  /** Tokens less likely than this times the most likely one are banned (number > 0 and ≤ 1). Default 0.1. */
  alpha?: number;
  /** Strength of the contrast (number > 0 and ≤ 100). Default 0.5. */
  beta?: number;
  /** Temperature of the draft model's distribution (number 0.01 to 100). Default 1.0. */
  amateur_temperature?: number;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all";
}

/** Adds a fixed bias to the logits of some tokens. */
export interface LogitBiasArguments {
  /** Bias by token id; ids are decimal without sign or leading zeros (object of 1 to 4096 numbers -100 to 100). */
  bias: Readonly<Record<string, number>>;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "thinking" | "answer";
}

/** Adds a bias to tokens that would complete a given sequence of tokens. */
export interface SequenceBiasArguments {
  /** The sequences, each at most once (list of 1 to 1024 BiasedSequence). */
  sequences: ReadonlyArray<BiasedSequence>;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "thinking" | "answer";
}

/** Scales down the logits of tokens that occur in the prompt or in the answer. */
export interface RepetitionPenaltyArguments {
  /** Factor; 1 changes nothing (number 0.01 to 100). */
  penalty: number;
  /** Most recent tokens that count; 0 counts all (integer 0 to 2147483647). Default 0. */
  window?: number;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "thinking" | "answer";
}

/** Lowers the logits of generated tokens by a penalty for every time they occurred. */
export interface FrequencyPenaltyArguments {
  /** Subtracted per occurrence; 0 changes nothing (number -2 to 2). */
  penalty: number;
  /** Most recent tokens that count; 0 counts all (integer 0 to 2147483647). Default 0. */
  window?: number;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "thinking" | "answer";
}

/** Lowers the logits of generated tokens by a penalty, once per distinct token. */
export interface PresencePenaltyArguments {
  /** Subtracted once; 0 changes nothing (number -2 to 2). */
  penalty: number;
  /** Most recent tokens that count; 0 counts all (integer 0 to 2147483647). Default 0. */
  window?: number;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "thinking" | "answer";
}

/** Penalises tokens that would continue a repeat, exponentially in its length (DRY). */
export interface DryArguments {
  /** Penalty of the shortest repeat; 0 is off (number 0 to 1000). Default 0.8. */
  multiplier?: number;
  /** Growth per token of the repeat (number 1 to 16). Default 1.75. */
  base?: number;
  /** Shortest repeat that is penalised (integer 1 to 512). Default 2. */
  allowed_length?: number;
  /** Texts across which no repeat is counted (list of 0 to 32 texts of 1 to 64 characters). Default ["\n", ":", "\"", "*"]. */
  breakers?: ReadonlyArray<string>;
  /** Number of newest tokens to search, 0 for all (integer 0 to 2147483647). Default 0. */
  range?: number;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "thinking" | "answer";
}

/** Boosts the tokens of the prompt, and those that follow the newest token there. */
export interface CiteFromPromptArguments {
  /** Added to the logit of every token of the prompt (number -100 to 100). Default 1.0. */
  boost?: number;
  /** Added to the logit of what follows the newest token in the prompt (number -100 to 100). Default 0.0. */
  conditional_boost?: number;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "thinking" | "answer";
}

/** Raises the logits of the end tokens as the answer grows; negative boosts lengthen answers. */
export interface GenLengthArguments {
  /** Added to the logits of the end tokens at 10 tokens (number -1000 to 1000). */
  boost: number;
  /** Exponent of the number of generated tokens (number 0 to 10). Default 2.0. */
  power?: number;
  /** Boost only where a sentence has just ended. Default false. */
  complete_sentences?: boolean;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "thinking" | "answer";
}

/** Raises the end tokens' logits exponentially once the answer exceeds a start length. */
export interface ExponentialDecayLengthArguments {
  /** Generated tokens after which the end tokens' logits begin to grow (integer 0 to 2147483647). */
  start: number;
  /** Growth per token; 1 changes nothing (number 1 to 100). */
  factor: number;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "thinking" | "answer";
}

/** Masks every token but the listed ones and, with `allow_end`, the end tokens. */
export interface AllowedTokensArguments {
  /** Ids that may be sampled (list of 1 to 4096 integers 0 to 2147483647). */
  token_ids: ReadonlyArray<number>;
  /** The request's end tokens may be sampled too. Default true. */
  allow_end?: boolean;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "thinking" | "answer";
}

/** Masks the listed tokens. */
export interface BannedTokensArguments {
  /** Ids that must not be sampled (list of 1 to 4096 integers 0 to 2147483647). */
  token_ids: ReadonlyArray<number>;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "thinking" | "answer";
}

/** Keeps words out of the answer, given as text or as token ids. */
export interface BadWordsArguments {
  /** Words as text, in every tokenisation; each also with a leading space (list of 1 to 1024 texts of 1 to 256 characters). */
  words?: ReadonlyArray<string> | null;
  /** Words as token ids, exactly these sequences (list of 1 to 1024 lists of 1 to 128 integers 0 to 2147483647). */
  token_ids?: ReadonlyArray<ReadonlyArray<number>> | null;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "thinking" | "answer";
}

/** The answer has none of the phrases, in no tokenization and no case. */
export interface PhraseBanArguments {
  /** Texts that the answer must not have (list of 1 to 64 texts of 1 to 256 characters). */
  phrases: ReadonlyArray<string>;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all";
}

/** Bans every token that writes a character of some Unicode scripts. */
export interface BanScriptsArguments {
  /** Unicode script names, as Han, Cyrillic or Latn (list of 1 to 64 texts like ^[A-Za-z][A-Za-z _-]*$ of 1 to 32 characters). */
  scripts: ReadonlyArray<string>;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "thinking" | "answer";
}

/** Bans every token that would complete an n-gram for the second time. */
export interface NoRepeatNgramArguments {
  /** Length of the n-gram in tokens (integer 1 to 256). */
  n: number;
  /** Text in which the first occurrence may be. Default "prompt_and_generated". */
  over?: "prompt_and_generated" | "generated";
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "thinking" | "answer";
}

/** Masks the end tokens until the answer has n tokens. */
export interface MinTokensArguments {
  /** Fewest tokens of the answer, its end token not counted; 0 changes nothing (integer 0 to 2147483647). */
  n: number;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "thinking" | "answer";
}

/** Restricts the answer to one of the choices, each boosted by its words in the prompt. */
export interface MultipleChoiceArguments {
  /** The answers to choose from (list of 1 to 256 texts of 1 to 256 characters). */
  choices: ReadonlyArray<string>;
  /** Weight of the logit of each choice's first word in the prompt (number -100 to 100). Default 0.0. */
  boost?: number;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "thinking" | "answer";
}

/** Restricts the answer to JSON that a JSON Schema describes. */
export interface JsonSchemaArguments {
  /** A JSON Schema; true allows any JSON (object or true or false). */
  schema: Readonly<Record<string, unknown>> | boolean;
  /** No whitespace between tokens of the JSON, no fraction of an integer. Default true. */
  compact?: boolean;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "answer";
}

/** Restricts the answer to what a regular expression matches as a whole. */
export interface RegexArguments {
  /** Matches the whole answer (text of 1 to 1048576 characters). */
  pattern: string;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "answer";
}

/** Restricts the answer to one of several texts. */
export interface ChoiceArguments {
  /** The texts; one of them is the whole answer (list of 1 to 4096 texts of 1 to 4096 characters). */
  choices: ReadonlyArray<string>;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "answer";
}

/** Restricts the answer to what a context-free grammar describes. */
export interface GrammarArguments {
  /** A Lark grammar with a rule named start (text of 1 to 1048576 characters). */
  lark: string;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "answer";
}

/** Lets the model write freely, and holds it to a grammar wherever it starts a tag. */
export interface StructuralTagArguments {
  /** Triggers and tags, named as XGrammar's structural tags name them (TriggeredTags). */
  format: TriggeredTags;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "answer";
}

/** Holds every tool call to the name of a tool and to the JSON Schema of its parameters. */
export interface ToolCallsArguments {
  /** Format in which the model writes calls. */
  format: "hermes" | "llama3_json" | "pythonic" | "mistral" | "mistral_args" | "qwen3_coder" | "glm45" | "deepseek_v3" | "deepseek_v3_1" | "harmony" | "phi4" | "functionary_v3_1" | "functionary_v3_2" | "nemotron_deci" | "granite" | "granite_3_1" | "phi4_mini" | "command_r" | "exaone4" | "jamba" | "glm47" | "olmo3" | "cohere2" | "kimi_k2" | "neutral";
  /** The functions (list of 1 to 128 Tool). */
  tools: ReadonlyArray<Tool>;
  /** Whether the model may or must call. Default "auto". */
  choice?: "auto" | "required" | "none";
  /** The only function that may be called (text of 1 to 64 characters). */
  tool?: string | null;
  /** More than one call is allowed. Default true. */
  parallel?: boolean;
  /** Format of an answer without calls; by default free text (JsonContent or RegexContent). */
  answer?: JsonContent | RegexContent | null;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "answer";
}

/** The answer is a given sequence, then the end token. */
export interface ForcedSequenceArguments {
  /** The phrase as text (text of 1 to 4096 characters). */
  text?: string | null;
  /** The phrase as token ids (list of 1 to 4096 integers 0 to 2147483647). */
  token_ids?: ReadonlyArray<number> | null;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "thinking" | "answer";
}

/** The answer begins with a given sequence. */
export interface ForcedPrefixArguments {
  /** The phrase as text (text of 1 to 4096 characters). */
  text?: string | null;
  /** The phrase as token ids (list of 1 to 4096 integers 0 to 2147483647). */
  token_ids?: ReadonlyArray<number> | null;
  /** The text may end within a token that goes on with it. Default false. */
  heal?: boolean;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "thinking" | "answer";
}

/** The answer ends with a given phrase, always and exactly, right before its end token. */
export interface ForceLastPhraseArguments {
  /** The last words of the answer, exactly (text of 1 to 4096 characters). */
  text: string;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "answer";
}

/** Writes a phrase whenever a trigger has been generated, or after a number of tokens. */
export interface TriggerPhraseArguments {
  /** The phrase (text of 1 to 4096 characters). */
  text: string;
  /** Text after which the phrase is written (text of 1 to 256 characters). */
  trigger?: string | null;
  /** Tokens after which the phrase is written (integer 1 to 2147483647). */
  after_tokens?: number | null;
  /** Most phrases in the answer (integer 1 to 4096). Default 1. */
  times?: number;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "thinking" | "answer";
}

/** Ends the answer when it loops: the generated tail is `copies` exact copies of a cycle. */
export interface LoopStopArguments {
  /** Longest cycle in tokens (integer 1 to 1024). Default 64. */
  max_period?: number;
  /** Copies in a row that count as a loop (integer 2 to 1024). Default 8. */
  copies?: number;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "thinking" | "answer";
}

/** Closes the thinking section when its token budget is used up. */
export interface ThinkingBudgetArguments {
  /** Most thinking tokens of the answer; 0 closes a section at once (integer 0 to 2147483647). */
  tokens: number;
  /** Additional tokens to reach the end of a line (integer 0 to 2147483647). Default 0. */
  grace?: number;
  /** Text to write before the closing tag when the budget is used up (text of 1 to 4096 characters). */
  message?: string | null;
  /** Tag that opens a section; the model's own by default (text of 1 to 256 characters). */
  start?: string | null;
  /** Tag that closes a section; the model's own by default (text of 1 to 256 characters). */
  end?: string | null;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all";
}

/** Divides the logits by a temperature; 0 leaves only the most likely token. */
export interface TemperatureArguments {
  /** Temperature; 1 changes nothing, 0 is greedy (number 0 to 100). */
  value: number;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "thinking" | "answer";
}

/** Divides the logits by a temperature that rises with the row's entropy. */
export interface DynamicTemperatureArguments {
  /** Temperature of a row that is certain (number 0 to 100). */
  low: number;
  /** Temperature of a row whose tokens are equally likely (number 0 to 100). */
  high: number;
  /** Above 1 the temperature stays low longer (number 0 to 10). Default 1.0. */
  exponent?: number;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "thinking" | "answer";
}

/** Keeps the k tokens with the highest logits. */
export interface TopKArguments {
  /** Number of tokens to keep; 0 or -1 keeps all, 1 is greedy (integer -1 to 2147483647). */
  k: number;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "thinking" | "answer";
}

/** Keeps the nucleus: the most likely tokens, as few as have a probability mass of at least p. */
export interface TopPArguments {
  /** Probability mass to keep; 1 keeps all, 0 is greedy (number 0 to 1). */
  p: number;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "thinking" | "answer";
}

/** Keeps the tokens of probability at least p times the highest. */
export interface MinPArguments {
  /** Least probability relative to the most likely token's; 0 keeps all (number 0 to 1). */
  p: number;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "thinking" | "answer";
}

/** Keeps the tokens at least a times as likely as the square of the highest probability. */
export interface TopAArguments {
  /** Least probability relative to the square of the highest; 0 keeps all (number 0 to 1). */
  a: number;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "thinking" | "answer";
}

/** Keeps the tokens whose information is closest to the row's entropy, up to a mass of p. */
export interface TypicalPArguments {
  /** Probability mass to keep; 1 keeps all (number > 0 and ≤ 1). */
  p: number;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "thinking" | "answer";
}

/** Keeps the logits within n standard deviations of the highest. */
export interface TopNSigmaArguments {
  /** Standard deviations below the highest logit (number 0 to 100). */
  n: number;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "thinking" | "answer";
}

/** Keeps the tokens of probability at least epsilon, and always the most likely. */
export interface EpsilonCutoffArguments {
  /** Least probability of a token; 0 keeps all (number ≥ 0 and < 1). */
  epsilon: number;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "thinking" | "answer";
}

/** Keeps the tokens of probability at least eta, which falls with the row's entropy. */
export interface EtaCutoffArguments {
  /** Highest value of the cutoff eta; 0 keeps all (number ≥ 0 and < 1). */
  epsilon: number;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "thinking" | "answer";
}

/** Excludes the top choices at random: of the tokens above a threshold the least likely stays. */
export interface XtcArguments {
  /** Least probability of a top choice (number 0 to 1). Default 0.1. */
  threshold?: number;
  /** Share of the steps at which the top choices are excluded (number 0 to 1). */
  probability: number;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "thinking" | "answer";
}

/** Steers the surprisal of the chosen tokens towards tau (mirostat 2.0). */
export interface MirostatArguments {
  /** Surprisal to aim for, in bits per token (number 0 to 100). Default 5.0. */
  tau?: number;
  /** Learning rate of mu (number 0 to 1). Default 0.1. */
  eta?: number;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "thinking" | "answer";
}

/** Watermarks the text with an operator's key, so that holders of the key can detect it. */
export interface WatermarkArguments {
  /** Name of one of the operator's keys (text of 1 to 128 characters). */
  key_id: string;
  /** Tokens that the noise of a token depends on (integer 1 to 64). Default 4. */
  context?: number;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "thinking" | "answer";
}

/** Watermarks the text with an operator's key by SynthID-Text's tournament, two tokens a round. */
export interface SynthidArguments {
  /** Name of one of the operator's keys (text of 1 to 128 characters). */
  key_id: string;
  /** Tokens before it that a token's g depends on (integer 1 to 64). Default 4. */
  context?: number;
  /** Rounds of the tournament (integer 1 to 64). Default 30. */
  depth?: number;
  /** Part of the generation that it applies to. Default "all". */
  scope?: "all" | "thinking" | "answer";
}

/** Builders of entries of a selection, by the names of the catalogue. */
export interface Processors {
  /** Moves the answer towards its prompt, and away from a negative one (classifier-free guidance). */
  cfg(args: CfgArguments): Processor;
  /** Moves the answer away from what a weaker model, the worker's draft model, would say (contrastive decoding). */
  contrastive(args?: ContrastiveArguments): Processor;
  /** Adds a fixed bias to the logits of some tokens. */
  logit_bias(args: LogitBiasArguments): Processor;
  /** Adds a bias to tokens that would complete a given sequence of tokens. */
  sequence_bias(args: SequenceBiasArguments): Processor;
  /** Scales down the logits of tokens that occur in the prompt or in the answer. */
  repetition_penalty(args: RepetitionPenaltyArguments): Processor;
  /** Lowers the logits of generated tokens by a penalty for every time they occurred. */
  frequency_penalty(args: FrequencyPenaltyArguments): Processor;
  /** Lowers the logits of generated tokens by a penalty, once per distinct token. */
  presence_penalty(args: PresencePenaltyArguments): Processor;
  /** Penalises tokens that would continue a repeat, exponentially in its length (DRY). */
  dry(args?: DryArguments): Processor;
  /** Boosts the tokens of the prompt, and those that follow the newest token there. */
  cite_from_prompt(args?: CiteFromPromptArguments): Processor;
  /** Raises the logits of the end tokens as the answer grows; negative boosts lengthen answers. */
  gen_length(args: GenLengthArguments): Processor;
  /** Raises the end tokens' logits exponentially once the answer exceeds a start length. */
  exponential_decay_length(args: ExponentialDecayLengthArguments): Processor;
  /** Masks every token but the listed ones and, with `allow_end`, the end tokens. */
  allowed_tokens(args: AllowedTokensArguments): Processor;
  /** Masks the listed tokens. */
  banned_tokens(args: BannedTokensArguments): Processor;
  /** Keeps words out of the answer, given as text or as token ids. */
  bad_words(args?: BadWordsArguments): Processor;
  /** The answer has none of the phrases, in no tokenization and no case. */
  phrase_ban(args: PhraseBanArguments): Processor;
  /** Bans every token that writes a character of some Unicode scripts. */
  ban_scripts(args: BanScriptsArguments): Processor;
  /** Bans every token that would complete an n-gram for the second time. */
  no_repeat_ngram(args: NoRepeatNgramArguments): Processor;
  /** Masks the end tokens until the answer has n tokens. */
  min_tokens(args: MinTokensArguments): Processor;
  /** Restricts the answer to one of the choices, each boosted by its words in the prompt. */
  multiple_choice(args: MultipleChoiceArguments): Processor;
  /** Restricts the answer to JSON that a JSON Schema describes. */
  json_schema(args: JsonSchemaArguments): Processor;
  /** Restricts the answer to what a regular expression matches as a whole. */
  regex(args: RegexArguments): Processor;
  /** Restricts the answer to one of several texts. */
  choice(args: ChoiceArguments): Processor;
  /** Restricts the answer to what a context-free grammar describes. */
  grammar(args: GrammarArguments): Processor;
  /** Lets the model write freely, and holds it to a grammar wherever it starts a tag. */
  structural_tag(args: StructuralTagArguments): Processor;
  /** Holds every tool call to the name of a tool and to the JSON Schema of its parameters. */
  tool_calls(args: ToolCallsArguments): Processor;
  /** The answer is a given sequence, then the end token. */
  forced_sequence(args?: ForcedSequenceArguments): Processor;
  /** The answer begins with a given sequence. */
  forced_prefix(args?: ForcedPrefixArguments): Processor;
  /** The answer ends with a given phrase, always and exactly, right before its end token. */
  force_last_phrase(args: ForceLastPhraseArguments): Processor;
  /** Writes a phrase whenever a trigger has been generated, or after a number of tokens. */
  trigger_phrase(args: TriggerPhraseArguments): Processor;
  /** Ends the answer when it loops: the generated tail is `copies` exact copies of a cycle. */
  loop_stop(args?: LoopStopArguments): Processor;
  /** Closes the thinking section when its token budget is used up. */
  thinking_budget(args: ThinkingBudgetArguments): Processor;
  /** Divides the logits by a temperature; 0 leaves only the most likely token. */
  temperature(args: TemperatureArguments): Processor;
  /** Divides the logits by a temperature that rises with the row's entropy. */
  dynamic_temperature(args: DynamicTemperatureArguments): Processor;
  /** Keeps the k tokens with the highest logits. */
  top_k(args: TopKArguments): Processor;
  /** Keeps the nucleus: the most likely tokens, as few as have a probability mass of at least p. */
  top_p(args: TopPArguments): Processor;
  /** Keeps the tokens of probability at least p times the highest. */
  min_p(args: MinPArguments): Processor;
  /** Keeps the tokens at least a times as likely as the square of the highest probability. */
  top_a(args: TopAArguments): Processor;
  /** Keeps the tokens whose information is closest to the row's entropy, up to a mass of p. */
  typical_p(args: TypicalPArguments): Processor;
  /** Keeps the logits within n standard deviations of the highest. */
  top_n_sigma(args: TopNSigmaArguments): Processor;
  /** Keeps the tokens of probability at least epsilon, and always the most likely. */
  epsilon_cutoff(args: EpsilonCutoffArguments): Processor;
  /** Keeps the tokens of probability at least eta, which falls with the row's entropy. */
  eta_cutoff(args: EtaCutoffArguments): Processor;
  /** Excludes the top choices at random: of the tokens above a threshold the least likely stays. */
  xtc(args: XtcArguments): Processor;
  /** Steers the surprisal of the chosen tokens towards tau (mirostat 2.0). */
  mirostat(args?: MirostatArguments): Processor;
  /** Watermarks the text with an operator's key, so that holders of the key can detect it. */
  watermark(args: WatermarkArguments): Processor;
  /** Watermarks the text with an operator's key by SynthID-Text's tournament, two tokens a round. */
  synthid(args: SynthidArguments): Processor;
}
export declare const processors: Readonly<Processors>;
// End of the section.

/** Prefix of the annotation that has a selection. */
export declare const ANNOTATION: string;

/** One entry of a selection, of a third party's processor as well. */
export declare function processor(name: string, args?: Record<string, unknown>): Processor;

/** OpenAI's `logit_bias` as a processor. Throws `TypeError` for what is no token id or no bias. */
export declare function fromOpenAILogitBias(bias: Readonly<Record<string | number, number>>): Processor;

export interface OpenAIFunction {
  type: "function";
  function: { name: string; description?: string; parameters?: Readonly<Record<string, unknown>> | null };
}

/** OpenAI's `tools` and `tool_choice` as the processor `tool_calls`. Throws `TypeError` for what is no function. */
export declare function fromOpenAITools(
  tools: ReadonlyArray<OpenAIFunction>,
  options: {
    /** How the model writes calls. */
    format: ToolCallsArguments["format"];
    toolChoice?: "none" | "auto" | "required" | { type: "function"; function: { name: string } };
    parallelToolCalls?: boolean;
    scope?: ToolCallsArguments["scope"];
    answer?: ToolCallsArguments["answer"];
  },
): Processor;

/**
 * Token healing at the end of a prompt: the prompt to send instead, and a processor that writes the
 * word that was taken off it at the beginning of the answer. Throws `TypeError` if no prompt is left.
 */
export declare function healed(prompt: string): [prompt: string, processor: Processor];

export interface SelectionOptions {
  /** Ask for the receipt; "debug" adds what was done to each token. */
  receipt?: boolean | "debug";
  /** Latest end of the answer, seconds since 1970. */
  deadline?: number;
  /** Names of processors of temperature and truncation in the order in which they are applied. */
  order?: ReadonlyArray<string>;
  /** False drafts no tokens for this request. */
  speculation?: boolean;
  /** Text that much of the answer is likely to be; tokens are drafted from it. */
  prediction?: string;
}

/** The selection as ASCII JSON. Throws `TypeError` for a number that is not finite, or an unknown option. */
export declare function selection(chosen: ReadonlyArray<Processor>, options?: SelectionOptions): string;

export interface SelectionFields {
  nvext: { annotations: string[]; extra_fields?: string[]; [name: string]: unknown };
}

/** Fields of a request that select processors: spread them into its body. */
export declare function logitsProcessors(
  chosen?: ReadonlyArray<Processor>,
  options?: SelectionOptions & { nvext?: Readonly<Record<string, unknown>> },
): SelectionFields;

export interface ProcessorWork {
  name: string;
  version: number;
  steps_active: number;
  tokens_forced: number;
  tokens_masked: number;
  first_position: number | null;
  last_position: number | null;
  rollbacks?: number;
}

/** The receipt of one answer; docs/processors.md of dynamo-logits-worker says what its fields are. */
export interface Receipt {
  version: number;
  engine: { name: string; version: string; computed_by: string; options: Record<string, unknown> };
  /** Digests of the checkpoint, of the LoRA adapter and of the draft model, where the answer has one. */
  model: {
    name: string;
    digest: string | null;
    adapter?: { name: string; digest: string | null };
    draft_model?: string;
  };
  mode: string;
  numerics: string;
  seed: number;
  prompt_length: number;
  replayed_tokens: number;
  processors: ProcessorWork[];
  tokens?: { position: number; token_id: number; processor: string; did: "biased" | "masked" | "forced" | "shaped" }[];
  tokens_left_out?: number;
  processed_logprobs?: { position: number; logprob: number }[];
  /** Temperature, truncation and repetition penalty, with where each value came from. */
  sampling?: Record<string, { value: number; from: "request" | "model" | "default" }>;
  preemptions: number | null;
  prompt_digest: string;
  /** Pictures of the prompt, which no digest covers. */
  images?: number;
  generated_tokens: number;
  answer_digest: string;
  /** Versions of updated weights, with the first token of the answer that each was used for. */
  weights?: { version: string; from_token: number; digest: string }[];
  /** Sampling controls and processors as JSON text, which a replay reads. */
  request?: string;
}

/** Receipts by choice, of a whole answer or of one chunk. Throws `TypeError` for one that is malformed. */
export declare function receiptsOf(answer: unknown): (Receipt | null)[];

/** The receipt of one choice; null if the answer has none. */
export declare function receiptOf(answer: unknown, choice?: number): Receipt | null;

/** What `python -m worker replay RECEIPT.json --prompt-file PROMPT.json` reads: one file of JSON each. */
export interface ReplayRequest {
  receipt: Receipt;
  prompt: number[] | Record<string, unknown>;
}

/**
 * The replay of one choice of an answer. Throws `TypeError` if its receipt is missing or not the last one, or if the
 * body has no prompt.
 */
export declare function replayRequest(
  answer: unknown,
  prompt: string | number[] | Readonly<Record<string, unknown>>,
  choice?: number,
): ReplayRequest;

export declare class ClientError extends Error {}
export declare class Unreachable extends ClientError {}
export declare class TimedOut extends Unreachable {}
export declare class Refused extends ClientError {
  constructor(status: number, body: string);
  readonly status: number;
  /** What the server says. */
  readonly detail: string;
  /** JSON path of the field that is wrong. */
  readonly param: string | null;
  readonly type: string | null;
  readonly code: string | number | null;
}
export declare class AnswerFailed extends ClientError {
  constructor(message: string, param?: string | null);
  readonly param: string | null;
}

export declare class EventReader {
  feed(piece: string): { name: string; data: string; comment: string }[];
}

export declare class StreamReader {
  readonly texts: Record<number, string>;
  readonly receipts: Record<number, Receipt>;
  /** Token ids of the prompt, where `nvext.annotations` has `token_ids`. */
  readonly promptTokenIds: number[] | null;
  readonly usage: Record<string, unknown> | null;
  readonly isDone: boolean;
  feed(piece: string): Chunk[];
  /** As `feed`, one after the other: those before an error come before it is thrown. */
  chunks(piece: string): Generator<Chunk>;
  end(): void;
}

export declare class Chunk {
  constructor(data: Record<string, any>);
  readonly data: Record<string, any>;
  readonly text: string;
  readonly choice: number;
  readonly receipt: Receipt | null;
}

export declare class Answer {
  constructor(data: Record<string, any>);
  readonly data: Record<string, any>;
  readonly texts: string[];
  readonly text: string;
  readonly receipts: (Receipt | null)[];
  readonly receipt: Receipt | null;
}

export interface ClientOptions {
  /** Address with the path before /chat/completions; by default the launch scripts'. */
  baseURL?: string;
  /** API key, printable ASCII, if the server has keys. */
  apiKey?: string | null;
  /**
   * Milliseconds for which the server may send nothing, at most 2^31 - 1; 600,000 by default. Node's own fetch waits
   * 300,000 at most.
   */
  timeoutMs?: number;
  headers?: Readonly<Record<string, string>>;
  fetch?: typeof globalThis.fetch;
}

export interface CallOptions {
  /** Cancels the request. */
  signal?: AbortSignal;
}

/** Fields of a chat's body, as OpenAI's; docs/request.md of dynamo-logits-worker has them all. */
export interface ChatFields {
  model: string;
  messages: ReadonlyArray<Readonly<Record<string, unknown>>>;
  stream?: never;
  [field: string]: unknown;
}

export interface CompletionFields {
  model: string;
  prompt: string | ReadonlyArray<string> | ReadonlyArray<number> | ReadonlyArray<ReadonlyArray<number>>;
  stream?: never;
  [field: string]: unknown;
}

/** Chunks to iterate over, once; leaving the loop early cancels the request. */
export interface Stream extends AsyncIterable<Chunk> {
  readonly read: StreamReader;
}

/** A client of a worker's front door. Its promises reject with `ClientError`. */
export declare class Client {
  /** Throws `TypeError` for an unknown option, or one out of range. */
  constructor(options?: ClientOptions);
  chat(fields: ChatFields, options?: CallOptions): Promise<Answer>;
  complete(fields: CompletionFields, options?: CallOptions): Promise<Answer>;
  streamChat(fields: ChatFields, options?: CallOptions): Stream;
  streamCompletion(fields: CompletionFields, options?: CallOptions): Stream;
  models(options?: CallOptions): Promise<string[]>;
  catalogue(options?: CallOptions): Promise<Record<string, unknown>[]>;
}

/** Receipts as the Vercel AI SDK's provider metadata: `providerMetadata.dynamoLogits.receipts`. */
export declare const metadataExtractor: {
  extractMetadata(answer: { parsedBody: unknown }): Promise<{ dynamoLogits: { receipts: any[] } } | undefined>;
  createStreamExtractor(): {
    processChunk(chunk: unknown): void;
    buildMetadata(): { dynamoLogits: { receipts: any[] } } | undefined;
  };
};
