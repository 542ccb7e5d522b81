package wire

// Bodies of administrative requests that have more to say than fields, and the
// reports that answer them, as JSON.

// JoinRequest is AdminJoin's body, and AdminRenew's, which needs no token and
// no name.
type JoinRequest struct {
	Token   string `json:"token,omitempty"`
	Name    string `json:"name,omitempty"`
	Request []byte `json:"request"` // PKCS #10, DER
}

// JoinAnswer answers both.
type JoinAnswer struct {
	Cluster   string `json:"cluster"`
	Role      string `json:"role"`
	Name      string `json:"name"`
	Chain     []byte `json:"chain"`                 // PEM
	Authority []byte `json:"authority"`             // PEM
	Key       []byte `json:"cluster_key,omitempty"` // for meta servers that join
}
