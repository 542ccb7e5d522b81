package wire

// Once is the first part of the body of a request that the server executes once even if the
// client sends the request several times.
type Once struct {
	// Token identifies the request: random, never zero.
	Token uint64 `json:"token,omitempty"`
}
