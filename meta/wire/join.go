package wire

import "penstock.io/penstock/meta"

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

// TokenRequest is AdminMakeToken's body.
type TokenRequest struct {
	Role    string `json:"role"`
	Name    string `json:"name,omitempty"`
	Seconds uint64 `json:"seconds"`
}

// TokenAnswer answers it. The token is a secret.
type TokenAnswer struct {
	Token string `json:"token"`
	ID    string `json:"id"`
}

// GrantsFor is AdminGrantFor's body: what a client gets for as long as a use lasts.
// Without volumes all that it has for the use is taken back.
type GrantsFor struct {
	Who     string         `json:"who"` // client/NAME; empty, without volumes: every client
	For     string         `json:"for"` // names the use
	Volumes []VolumeRights `json:"volumes,omitempty"`
	// AsOf is a revision that AdminRevision told while somebody waited for this: if a
	// later request for the client was served by then, it is refused with Again. 0: as
	// of when it is served.
	AsOf int64 `json:"as_of,omitempty"`
}

// RevisionAnswer answers AdminRevision; in a cluster without certificates it is 0.
type RevisionAnswer struct {
	Revision int64 `json:"revision"`
}

// VolumeRights are rights on a volume.
type VolumeRights struct {
	Volume meta.VolumeID `json:"volume"`
	Rights string        `json:"rights"` // read, write, admin
}
