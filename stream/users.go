package stream

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/sha512"
	"crypto/subtle"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/xdg-go/scram"

	penstock "penstock.io/penstock"
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

// Users are the users that clients of a gateway log in as. A file has the users, their ids, and
// what proves their passwords; the file has no password:
//
//	{"version": 2, "users": {"NAME": {"uid": 1000, "gids": [1000, ...], "secrets":
//	  {"SCRAM-SHA-256": {"iterations", "salt", "stored_key", "server_key"}, ...}}}}
//
// A user without secrets logs in with a client certificate of this name. The file is looked at
// for every login and every question of a Login, and is read when it has changed.
type Users struct {
	path string
	// decoy makes the secrets of names that no user has, so that a login with such a name looks
	// like a login with a wrong password.
	decoy [32]byte
	// Unsafe, a positive control, switches NoRights and NoEnd. The caller sets the field before the
	// first login.
	Unsafe Unsafe
	// derivations has room for the derivations of keys from passwords that run at a time.
	derivations chan struct{}

	mu     sync.Mutex
	file   fs.FileInfo // of record; nil: read the file again
	record usersRecord // the last good contents
	good   time.Time   // when record was the contents of the file
	// checked has a digest of the last right password of a user, so that a password that comes
	// with every request is derived once.
	checked map[string]checkedPassword
}

// checkedPassword is a keyed digest of a password that was right for the secrets of proof.
type checkedPassword struct {
	proof  proof
	digest [sha256.Size]byte
}

// proof is a digest of what proves the password of a user.
type proof [sha256.Size]byte

const (
	usersVersion  = 2
	maxUsersFile  = 8 << 20
	maxPassword   = 256
	maxGroupIDs   = 64
	iterations    = 8192
	minIterations = 4096 // RFC 7677
	maxIterations = 1 << 20
	// usersGrace is how long open logins go on while the file can't be read.
	usersGrace = 30 * time.Second
	// settled is the age of a file's last change from which the file's time shows a later change.
	settled = 2 * time.Second
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
	Version int                    `json:"version"`
	Users   map[string]*userRecord `json:"users"`
}

// userRecord is the JSON of a user.
type userRecord struct {
	UID     *uint32              `json:"uid"`
	GIDs    []uint32             `json:"gids"`
	Secrets map[Mechanism]secret `json:"secrets,omitempty"`
}

// proof returns the digest of the user's secrets.
func (e *userRecord) proof() proof {
	h := sha256.New()
	for _, m := range Mechanisms {
		s := e.Secrets[m]
		for _, part := range [][]byte{s.Salt, s.StoredKey, s.ServerKey} {
			fmt.Fprintf(h, "%d:%x ", s.Iterations, part)
		}
	}
	return proof(h.Sum(nil))
}

// OpenUsers checks a file of users. Errors: NotFound, AccessDenied (other users of the machine
// may read the file), Corrupt, Version.
func OpenUsers(path string) (*Users, error) {
	u := &Users{path: path, derivations: make(chan struct{}, max(1, runtime.GOMAXPROCS(0)/2)), checked: map[string]checkedPassword{}}
	if _, err := rand.Read(u.decoy[:]); err != nil {
		return nil, err
	}
	_, err := u.read()
	return u, err
}

// SetUser adds a user to a file of users, or changes the user: the password, the ids, or both.
// An empty password leaves the password as it is: a new user then has none, and can only log
// in with a client certificate. ids nil leaves the ids as they are, and is refused for a new user.
// The file is made if it is missing. Two calls at a time may lose one of the changes. Errors:
// Invalid (the name, the password or the ids), and errors of OpenUsers.
func SetUser(path, name, password string, ids *User) error {
	const op = "set user"
	if !userName.MatchString(name) {
		return meta.E(op, meta.Invalid, name, errors.New("a user's name has 1 to 64 letters, digits, and . _ @ - after the first"))
	}
	if len(password) > maxPassword || bytes.ContainsFunc([]byte(password), func(r rune) bool { return r < ' ' || r > '~' }) {
		return meta.E(op, meta.Invalid, name, fmt.Errorf("a password has 1 to %d printable ASCII characters", maxPassword))
	}
	r, err := (&Users{path: path}).read()
	if errors.Is(err, meta.NotFound) {
		r, err = usersRecord{Version: usersVersion, Users: map[string]*userRecord{}}, nil
	}
	if err != nil {
		return err
	}
	e := r.Users[name]
	switch {
	case e == nil && ids == nil:
		return meta.E(op, meta.Invalid, name, errors.New("a new user needs the user id and group ids by which modes and ACLs count"))
	case e == nil:
		e = &userRecord{}
		r.Users[name] = e
	}
	if ids != nil {
		e.UID, e.GIDs = &ids.UID, ids.GIDs
	}
	if !e.idsValid() {
		return meta.E(op, meta.Invalid, name, fmt.Errorf("a user has a user id and 1 to %d group ids below %d", maxGroupIDs, uint32(math.MaxUint32)))
	}
	if password != "" {
		if e.Secrets, err = secretsOf(name, password); err != nil {
			return err
		}
	}
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return replaceFile(path, append(b, '\n'))
}

// secretsOf makes what proves a password, with new salts.
func secretsOf(name, password string) (map[Mechanism]secret, error) {
	all := map[Mechanism]secret{}
	for _, m := range Mechanisms {
		salt := make([]byte, 16)
		if _, err := rand.Read(salt); err != nil {
			return nil, err
		}
		c, err := derive(m, name, password, scram.KeyFactors{Salt: string(salt), Iters: iterations})
		if err != nil {
			return nil, err
		}
		all[m] = secret{Iterations: iterations, Salt: salt, StoredKey: c.StoredKey, ServerKey: c.ServerKey}
	}
	return all, nil
}

// idsValid reports that the ids are ids of a user.
func (e *userRecord) idsValid() bool {
	return e.UID != nil && *e.UID != math.MaxUint32 && len(e.GIDs) >= 1 && len(e.GIDs) <= maxGroupIDs && !slices.Contains(e.GIDs, math.MaxUint32)
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

// exposed reports whether users other than the process's user may read a file, or change it. The
// process's group may read a file of root: Kubernetes gives Secrets to processes in this way.
func exposed(info fs.FileInfo, uid, gid uint32) bool {
	perm := info.Mode().Perm()
	of, ok := info.Sys().(*syscall.Stat_t)
	if ok && uid != 0 && of.Uid == 0 && of.Gid == gid {
		return perm&0o037 != 0
	}
	return perm&0o077 != 0
}

// read returns the contents of the file, and reads the file if it may have changed.
func (u *Users) read() (r usersRecord, err error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	now := time.Now()
	info, err := os.Stat(u.path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return r, meta.E("read users", meta.NotFound, u.path, nil)
	case err != nil:
		return r, err
	case exposed(info, uint32(os.Geteuid()), uint32(os.Getegid())):
		return r, meta.E("read users", meta.AccessDenied, u.path, fmt.Errorf("its mode is %04o: give it 0600, since other users of the machine could try passwords against its secrets", info.Mode().Perm()))
	case info.Size() > maxUsersFile:
		return r, meta.E("read users", meta.TooBig, u.path, fmt.Errorf("it has %d bytes, a file of users has at most %d", info.Size(), maxUsersFile))
	case u.file != nil && os.SameFile(info, u.file) && info.ModTime().Equal(u.file.ModTime()) && info.Size() == u.file.Size():
		u.good = now
		return u.record, nil
	}
	b, err := os.ReadFile(u.path)
	if err != nil {
		return r, err
	}
	if r, err = decodeUsers(u.path, b); err != nil {
		return r, err
	}
	u.record, u.good, u.file = r, now, nil
	if now.Sub(info.ModTime()) > settled {
		u.file = info
	}
	return r, nil
}

// known returns the contents of the file for an open login: for a while, the last good contents
// if the file can't be read.
func (u *Users) known() (usersRecord, error) {
	r, err := u.read()
	if err == nil {
		return r, nil
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if !u.good.IsZero() && time.Since(u.good) < usersGrace {
		return u.record, nil
	}
	return r, err
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
	if r.Version < usersVersion {
		return r, meta.E(op, meta.Version, path, fmt.Errorf("version %d has no user ids: make the file again with 'penstock stream password'", r.Version))
	}
	for name, e := range r.Users {
		if e == nil || !userName.MatchString(name) || !e.idsValid() {
			return r, meta.E(op, meta.Corrupt, path, fmt.Errorf("user %q has no valid name, uid or gids", name))
		}
		for m, s := range e.Secrets {
			h := m.Hash()
			if h == nil || len(s.StoredKey) != h().Size() || len(s.ServerKey) != h().Size() ||
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
	var s secret
	ok := false
	if e := r.Users[name]; e != nil {
		s, ok = e.Secrets[m]
	}
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

// Begin returns the Login of a user who is about to prove a password, or has shown a client
// certificate. A name that no user has gets a Login that has ended.
func (u *Users) Begin(name string) (*Login, error) {
	r, err := u.read()
	if err != nil {
		return nil, err
	}
	l := &Login{Name: name, users: u}
	if e := r.Users[name]; e != nil {
		l.proof = e.proof()
	}
	return l, nil
}

// Check checks a password. A password that was right before costs a digest; another password
// costs the derivation of its key, and few derivations run at a time. Errors: AccessDenied (no
// such user, or another password), errors of OpenUsers, and why ctx ended.
func (u *Users) Check(ctx context.Context, name, password string) (*Login, error) {
	denied := meta.E("log in", meta.AccessDenied, name, errors.New("no user has this name and password"))
	if len(password) > maxPassword || len(name) > maxPassword {
		return nil, denied
	}
	l, err := u.Begin(name) // before the secret is read: a change between ends the login
	if err != nil {
		return nil, err
	}
	h := hmac.New(sha256.New, u.decoy[:])
	fmt.Fprintf(h, "password %d:%s %d:%s", len(name), name, len(password), password)
	digest := [sha256.Size]byte(h.Sum(nil))
	u.mu.Lock()
	before, ok := u.checked[name]
	u.mu.Unlock()
	if ok && before.proof == l.proof && hmac.Equal(before.digest[:], digest[:]) {
		return l, nil
	}
	select {
	case u.derivations <- struct{}{}:
		defer func() { <-u.derivations }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	want, err := u.Secret(SHA256, name)
	if err != nil {
		return nil, err
	}
	have, err := derive(SHA256, name, password, want.KeyFactors)
	if err != nil || subtle.ConstantTimeCompare(have.StoredKey, want.StoredKey) != 1 {
		return nil, denied
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.checked[name] = checkedPassword{l.proof, digest} // at most one for each user that the file had
	return l, nil
}

// BeginTLS returns the Login of a client that has shown a certificate which the server's
// configuration accepts: the certificate's common name is the name of the user. A client without a
// certificate has no Login yet: nil. Errors: AccessDenied (no such user).
func (u *Users) BeginTLS(state tls.ConnectionState) (*Login, error) {
	if len(state.VerifiedChains) == 0 {
		return nil, nil
	}
	l, err := u.Begin(state.VerifiedChains[0][0].Subject.CommonName)
	if err == nil {
		_, err = l.User()
	}
	if err != nil {
		return nil, err
	}
	return l, nil
}

// Login is a client that has logged in at a gateway as a user of the gateway's file of users.
// Every door of a gateway asks the client's Login what the client may do. The zero Login pointer
// stands for a gateway that asks for no credentials, and permits everything.
//
// A Login ends when the user is removed or gets another password. Login looks at the file and at
// the attributes of directories again for every question.
type Login struct {
	Name   string
	users  *Users
	proof  proof      // of the user when the client logged in
	member MemberFunc // nil: the client is a user

	mu   sync.Mutex
	acls map[directoryID]knownACL
}

// directoryID names a directory.
type directoryID struct {
	volume meta.VolumeID
	ino    meta.Ino
}

// knownACL is the ACL of a directory at a count of its changes.
type knownACL struct {
	change uint64
	acl    []byte
}

// maxACLs bounds the remembered ACLs of a Login.
const maxACLs = 64

// MemberFunc tells as which user a client of the cluster acts in a volume, and what the client's
// grants permit there at most. Errors: AccessDenied (the client's certificate is void), Unavailable.
type MemberFunc func(ctx context.Context, volume meta.VolumeID) (User, Permission, error)

// BeginMember returns the Login of a client of the cluster, which has shown its certificate of the
// cluster. The client, a mount, has already asked the modes and ACLs for its own users. The Login can
// be used for streams that the client names by their directories (Host.StreamAt). The function is
// asked again for every question.
func (u *Users) BeginMember(name string, member MemberFunc) *Login {
	return &Login{Name: name, users: u, member: member}
}

// in returns the user's ids in a volume, and refuses a client of the cluster whose grants do not
// permit want. Errors: AccessDenied, and those of MemberFunc.
func (l *Login) in(ctx context.Context, v *penstock.Volume, want Permission) (User, error) {
	if l.member == nil {
		return l.User()
	}
	u, most, err := l.member(ctx, v.ID())
	if err == nil && most&want != want && !l.users.Unsafe.NoRights {
		err = meta.E("check permissions", meta.AccessDenied, "volume "+v.Name(), fmt.Errorf("no grant permits %s to %s: an administrator can add one with 'penstock grant add'", l.Name, want.text()))
	}
	return u, err
}

// User returns the user's ids. Errors: AccessDenied (the login has ended, or is of a client of the
// cluster).
func (l *Login) User() (User, error) {
	if l.member != nil {
		return User{}, meta.E("log in", meta.AccessDenied, l.Name, errors.New("a client of the cluster names a stream by its directory; log in as a user to name a stream by its path"))
	}
	r, err := l.users.known()
	if err != nil {
		return User{}, meta.E("log in", meta.AccessDenied, l.Name, err)
	}
	e := r.Users[l.Name]
	if e == nil || l.proof != e.proof() && !l.users.Unsafe.NoEnd {
		return User{}, meta.E("log in", meta.AccessDenied, l.Name, errors.New("the user was removed or has another password since: log in again"))
	}
	return User{*e.UID, e.GIDs}, nil
}
