package wire

// JSON bodies of administrative requests whose content does not fit the fields of Admin, and
// the JSON reports of the answers.

// JoinRequest is the body of AdminJoin.
type JoinRequest struct {
	Token   string `json:"token"`
	Name    string `json:"name"`
	Request []byte `json:"request"` // PKCS #10, DER
}

// JoinAnswer answers a JoinRequest.
type JoinAnswer struct {
	Cluster   string `json:"cluster"`
	Role      string `json:"role"`
	Name      string `json:"name"`
	Chain     []byte `json:"chain"`                 // PEM
	Authority []byte `json:"authority"`             // PEM
	Key       []byte `json:"cluster_key,omitempty"` // for joining meta servers
}
