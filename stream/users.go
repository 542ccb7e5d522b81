package stream

import (
	"bytes"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha512"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"

	"github.com/xdg-go/scram"

	"penstock.io/penstock/meta"
)

// Mechanism is a SCRAM mechanism, by the name that SASL gives it (RFC 5802, RFC 7677).
type Mechanism string

// The mechanisms for which a file of users has secrets.
const (
	SHA256 Mechanism = "SCRAM-SHA-256"
	SHA512 Mechanism = "SCRAM-SHA-512"
)

// Mechanisms are the known mechanisms.
var Mechanisms = []Mechanism{SHA256, SHA512}

// Hash returns the hash of a mechanism; nil: the mechanism is not known.
func (m Mechanism) Hash() scram.HashGeneratorFcn {
	switch m {
	case SHA256:
		return scram.SHA256
	case SHA512:
		return scram.SHA512
	}
	return nil
}

// Users are the users that clients of a gateway log in as. A file has the users and what proves
// their passwords; the file has no password:
//
//	{"version": 1, "users": {"NAME": {"SCRAM-SHA-256": {"iterations", "salt", "stored_key", "server_key"}, ...}}}
//
// The file is read for every login, so that a changed file counts from the next login on.
type Users struct {
	path string
	// decoy makes the secrets of names that no user has, so that a login with such a name looks
	// like a login with a wrong password.
	decoy [32]byte
}

const (
	usersVersion  = 1
	maxUsersFile  = 8 << 20
	maxPassword   = 256
	iterations    = 8192
	minIterations = 4096 // RFC 7677
	maxIterations = 1 << 20
)

var userName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$`)

// secret is the JSON of what proves a password.
type secret struct {
	Iterations int    `json:"iterations"`
	Salt       []byte `json:"salt"`
	StoredKey  []byte `json:"stored_key"`
	ServerKey  []byte `json:"server_key"`
}

type usersRecord struct {
	Version int                             `json:"version"`
	Users   map[string]map[Mechanism]secret `json:"users"`
}

// OpenUsers checks a file of users. Errors: NotFound, AccessDenied (other users of the machine
// may read the file), Corrupt, Version.
func OpenUsers(path string) (*Users, error) {
	u := &Users{path: path}
	if _, err := rand.Read(u.decoy[:]); err != nil {
		return nil, err
	}
	_, err := u.read()
	return u, err
}

// SetPassword adds a user to a file of users, or changes the user's password. The file is made
// if it is missing. Two calls at a time may lose one of the changes. Errors: Invalid (the name
// or the password), and errors of OpenUsers.
func SetPassword(path, name, password string) error {
	const op = "set password"
	if !userName.MatchString(name) {
		return meta.E(op, meta.Invalid, name, errors.New("a user's name has 1 to 64 letters, digits, and . _ @ - after the first"))
	}
	if len(password) == 0 || len(password) > maxPassword || bytes.ContainsFunc([]byte(password), func(r rune) bool { return r < ' ' || r > '~' }) {
		return meta.E(op, meta.Invalid, name, fmt.Errorf("a password has 1 to %d printable ASCII characters", maxPassword))
	}
	r, err := (&Users{path: path}).read()
	if errors.Is(err, meta.NotFound) {
		r, err = usersRecord{Version: usersVersion, Users: map[string]map[Mechanism]secret{}}, nil
	}
	if err != nil {
		return err
	}
	r.Users[name] = map[Mechanism]secret{}
	for _, m := range Mechanisms {
		salt := make([]byte, 16)
		if _, err := rand.Read(salt); err != nil {
			return err
		}
		c, err := derive(m, name, password, scram.KeyFactors{Salt: string(salt), Iters: iterations})
		if err != nil {
			return err
		}
		r.Users[name][m] = secret{Iterations: iterations, Salt: salt, StoredKey: c.StoredKey, ServerKey: c.ServerKey}
	}
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return replaceFile(path, append(b, '\n'))
}

// replaceFile replaces a file as a whole, with mode 0600, and makes that durable.
func replaceFile(path string, b []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	d, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

func derive(m Mechanism, name, password string, kf scram.KeyFactors) (scram.StoredCredentials, error) {
	c, err := m.Hash().NewClient(name, password, "")
	if err != nil {
		return scram.StoredCredentials{}, err
	}
	return c.GetStoredCredentialsWithError(kf)
}

func (u *Users) read() (r usersRecord, err error) {
	info, err := os.Stat(u.path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return r, meta.E("read users", meta.NotFound, u.path, nil)
	case err != nil:
		return r, err
	case info.Mode().Perm()&0o077 != 0:
		return r, meta.E("read users", meta.AccessDenied, u.path, fmt.Errorf("its mode is %04o: give it 0600, since other users of the machine could try passwords against its secrets", info.Mode().Perm()))
	case info.Size() > maxUsersFile:
		return r, meta.E("read users", meta.TooBig, u.path, fmt.Errorf("it has %d bytes, a file of users has at most %d", info.Size(), maxUsersFile))
	}
	b, err := os.ReadFile(u.path)
	if err != nil {
		return r, err
	}
	return decodeUsers(u.path, b)
}

// decodeUsers decodes a file of users. Errors: Corrupt, Version.
func decodeUsers(path string, b []byte) (r usersRecord, err error) {
	const op = "read users"
	if err := json.Unmarshal(b, &r); err != nil || r.Version < 1 || r.Users == nil {
		return r, meta.E(op, meta.Corrupt, path, err)
	}
	if r.Version > usersVersion {
		return r, meta.E(op, meta.Version, path, fmt.Errorf("version %d is newer than %d: use a newer program", r.Version, usersVersion))
	}
	for name, all := range r.Users {
		for m, s := range all {
			h := m.Hash()
			if h == nil || !userName.MatchString(name) || len(s.StoredKey) != h().Size() || len(s.ServerKey) != h().Size() ||
				len(s.Salt) < 8 || s.Iterations < minIterations || s.Iterations > maxIterations {
				return r, meta.E(op, meta.Corrupt, path, fmt.Errorf("the secret %s of user %q is malformed", m, name))
			}
		}
	}
	return r, nil
}

// Secret returns what proves a user's password in a mechanism. For a name that no user has,
// Secret returns a secret that no password proves, the same for each call.
func (u *Users) Secret(m Mechanism, name string) (scram.StoredCredentials, error) {
	r, err := u.read()
	if err != nil {
		return scram.StoredCredentials{}, err
	}
	s, ok := r.Users[name][m]
	if !ok {
		part := func(what string) []byte {
			h := hmac.New(sha512.New, u.decoy[:])
			fmt.Fprintf(h, "%s %s %s", what, m, name)
			return h.Sum(nil)[:m.Hash()().Size()]
		}
		s = secret{Iterations: iterations, Salt: part("salt")[:16], StoredKey: part("stored"), ServerKey: part("server")}
	}
	return scram.StoredCredentials{KeyFactors: scram.KeyFactors{Salt: string(s.Salt), Iters: s.Iterations}, StoredKey: s.StoredKey, ServerKey: s.ServerKey}, nil
}

// Check checks a password. Errors: AccessDenied (no such user, or another password), and errors
// of OpenUsers.
func (u *Users) Check(name, password string) error {
	want, err := u.Secret(SHA256, name)
	if err != nil {
		return err
	}
	denied := meta.E("log in", meta.AccessDenied, name, errors.New("no user has this name and password"))
	if len(password) > maxPassword {
		return denied
	}
	have, err := derive(SHA256, name, password, want.KeyFactors)
	if err != nil || subtle.ConstantTimeCompare(have.StoredKey, want.StoredKey) != 1 {
		return denied
	}
	return nil
}
