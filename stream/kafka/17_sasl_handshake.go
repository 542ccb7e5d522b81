package kafka

import "github.com/twmb/franz-go/pkg/kmsg"

const saslHandshakeKey = 17

// beginSASLHandshake begins a login when the request is read, since the next requests depend on
// the login. After an error the connection ends.
func beginSASLHandshake(_ *Server, r *request) func() kmsg.Response {
	q := r.body.(*kmsg.SASLHandshakeRequest)
	p := q.ResponseKind().(*kmsg.SASLHandshakeResponse)
	p.SetVersion(r.version)
	p.SupportedMechanisms = mechanisms()
	l := &r.conn.login
	switch {
	case r.version == 0:
		// After version 0 the tokens come without frames. librdkafka uses version 1, but takes a
		// server for one without SASL that does not name version 0.
		p.ErrorCode, r.last = codeUnsupportedVersion, true
	case !l.wanted() || l.step != nil:
		p.ErrorCode = codeLoginState
	case !l.choose(q.Mechanism):
		p.ErrorCode, r.last = codeMechanism, true
	}
	return func() kmsg.Response { return p }
}
