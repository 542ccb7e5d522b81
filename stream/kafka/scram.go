package kafka

import (
	"crypto/hmac"
	"crypto/subtle"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"

	"github.com/xdg-go/scram"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream"
)

// scramLogin is a login by SCRAM (RFC 5802). The library reads the client's first message and
// makes the server's. The last message is checked here, because librdkafka before 2.6.1 repeats
// its nonce in that message: Kafka takes such a message, and the library does not. The proof
// covers the whole message, with the nonce as the client sent it.
type scramLogin struct {
	hash   scram.HashGeneratorFcn
	server *scram.ServerConversation
	user   string // from the client's first message
	as     *stream.Login
	secret scram.StoredCredentials

	header      string // of the client's first message: the part before the name and the nonce
	clientFirst string // the client's first message without the header
	serverFirst string
}

func newScramLogin(users *stream.Users, m stream.Mechanism) (*scramLogin, error) {
	l := &scramLogin{hash: m.Hash()}
	server, err := l.hash.NewServer(func(name string) (c scram.StoredCredentials, err error) {
		l.user = name
		if l.as, err = users.Begin(name); err != nil { // before the secret is read: a change between ends the login
			return c, err
		}
		l.secret, err = users.Secret(m, name)
		return l.secret, err
	})
	if err != nil {
		return nil, err
	}
	l.server = server.NewConversation()
	return l, nil
}

// first takes the client's first message, and returns the server's first message.
func (l *scramLogin) first(token string) (string, error) {
	answer, err := l.server.Step(token)
	if err != nil {
		return "", err
	}
	parts := strings.SplitAfterN(token, ",", 3)
	if len(parts) < 3 {
		return "", meta.E("log in", meta.AccessDenied, l.user, errors.New("SCRAM: the client's first message is malformed"))
	}
	l.header, l.clientFirst, l.serverFirst = parts[0]+parts[1], parts[2], answer
	if as := strings.TrimSuffix(parts[1], ","); as != "" && as != "a="+l.user {
		return "", meta.E("log in", meta.AccessDenied, l.user, errors.New("the client asks to act as another user"))
	}
	return answer, nil
}

// last takes the client's last message, and returns the server's last message, which proves
// that the server has the user's secret.
func (l *scramLogin) last(token string) (string, error) {
	denied := func(why string) error {
		return meta.E("log in", meta.AccessDenied, l.user, fmt.Errorf("SCRAM: %s", why))
	}
	text, proof64, found := strings.Cut(token, ",p=")
	binding, nonce, both := strings.Cut(text, ",r=")
	serverNonce, _, _ := strings.Cut(strings.TrimPrefix(l.serverFirst, "r="), ",")
	if !found || !both || binding != "c="+base64.StdEncoding.EncodeToString([]byte(l.header)) {
		return "", denied("the client's last message is malformed")
	}
	if !strings.HasSuffix(nonce, serverNonce) || strings.Contains(nonce, ",") {
		return "", denied("the client's last message has another nonce")
	}
	proof, err := base64.StdEncoding.DecodeString(proof64)
	if err != nil {
		return "", denied("the client's proof is malformed")
	}
	auth := l.clientFirst + "," + l.serverFirst + "," + text
	sign := func(key []byte) []byte {
		h := hmac.New(l.hash, key)
		h.Write([]byte(auth))
		return h.Sum(nil)
	}
	signature := sign(l.secret.StoredKey)
	if len(proof) != len(signature) {
		return "", denied("the client's proof is malformed")
	}
	subtle.XORBytes(proof, proof, signature) // the client's key, if the client has the password
	h := l.hash()
	h.Write(proof)
	if subtle.ConstantTimeCompare(h.Sum(nil), l.secret.StoredKey) != 1 {
		return "", denied("no user has this name and password")
	}
	return "v=" + base64.StdEncoding.EncodeToString(sign(l.secret.ServerKey)), nil
}
