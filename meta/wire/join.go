package wire

// JSON bodies of administrative requests whose content does not fit the fields of Admin, and
// the JSON reports of the answers.

// JoinRequest is the body of AdminJoin and of AdminRenew. AdminRenew needs no token and no
// name.
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
	Key       []byte `json:"cluster_key,omitempty"` // for joining meta servers
}
