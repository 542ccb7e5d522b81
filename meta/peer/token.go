package peer

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"strings"

	"penstock.io/penstock/meta"
)

// Token is a join token, a text that an administrator carries to a new machine:
//
//	psj1.<role>.<id>.<secret>.<SHA-256 of the authority's certificate, hex>
//
// Id and secret are base32. The cluster keeps the id and a hash of the secret, so that etcd's
// data lets nobody join. By the last part the joiner verifies the metadata server before the
// joiner has a certificate of the authority.
type Token struct {
	Role      Role
	ID        string
	Secret    string
	Authority string
}

const tokenVersion = "psj1"

// NewToken makes a token of a random secret of 128 bits.
func NewToken(role Role, authority string) Token {
	return Token{Role: role, ID: strings.ToLower(rand.Text()[:10]), Secret: strings.ToLower(rand.Text()), Authority: authority}
}

// String returns the token's text. The text is a secret: commands print the text to standard
// output, and never log the text.
func (t Token) String() string {
	return strings.Join([]string{tokenVersion, string(t.Role), t.ID, t.Secret, t.Authority}, ".")
}

// ParseToken parses a token. The error does not contain the text. Errors: Invalid.
func ParseToken(s string) (Token, error) {
	bad := meta.E("read join token", meta.Invalid, "", errors.New("it is no join token as 'penstock cluster join-token' prints them"))
	p := strings.Split(strings.TrimSpace(s), ".")
	if len(p) != 5 || p[0] != tokenVersion {
		return Token{}, bad
	}
	role, err := ParseRole(p[1])
	if err != nil {
		return Token{}, bad
	}
	if fp, err := hex.DecodeString(p[4]); err != nil || len(fp) != sha256.Size || p[4] != strings.ToLower(p[4]) {
		return Token{}, bad
	}
	for _, x := range p[2:4] {
		if len(x) < 10 || len(x) > 64 || strings.Trim(x, "abcdefghijklmnopqrstuvwxyz234567") != "" {
			return Token{}, bad
		}
	}
	return Token{Role: role, ID: p[2], Secret: p[3], Authority: p[4]}, nil
}

// SecretHash returns the hash kept by the cluster. The secret is random enough to need no
// salt.
func (t Token) SecretHash() string {
	s := sha256.Sum256([]byte(t.Secret))
	return hex.EncodeToString(s[:])
}

// Matches compares with a kept hash in constant time.
func (t Token) Matches(hash string) bool {
	return subtle.ConstantTimeCompare([]byte(t.SecretHash()), []byte(hash)) == 1
}
