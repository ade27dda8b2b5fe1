"""`tie proxy`: OpenAI's API on this machine, for tools that speak it; behind it sealed requests to the nodes.

handler      routes, who may ask, one exchange from its request to its end
models       which may be asked for, and when that is learned anew
requests     what may be asked, and what is refused by name
translate    an API request as the sealed protocol has it
answers      what answers in both of the API's forms have
chat         an answer as `/v1/chat/completions` gives it, whole or in chunks
completions  the same for `/v1/completions`
failures     what went wrong, as HTTP status and JSON error
gathering    pieces of an answer that go out together
service      listens, serves, stops
"""
