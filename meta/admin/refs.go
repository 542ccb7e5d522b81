package admin

import (
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/peer"
)

// Numbered returns a reference to a volume by number.
func Numbered(id meta.VolumeID) *VolumeRef {
	return &VolumeRef{Volume: &VolumeRef_Id{Id: uint32(id)}}
}

// Named returns a reference to a volume by name.
func Named(name string) *VolumeRef { return &VolumeRef{Volume: &VolumeRef_Name{Name: name}} }

// roles maps the roles of certificates to roles of the API.
var roles = map[peer.Role]Role{
	peer.Meta: Role_ROLE_META, peer.ChunkServer: Role_ROLE_CHUNK_SERVER,
	peer.Client: Role_ROLE_CLIENT, peer.Admin: Role_ROLE_ADMIN, peer.Gateway: Role_ROLE_GATEWAY,
}

// RoleOf translates a certificate's role to the API.
func RoleOf(r peer.Role) Role { return roles[r] }

// Peer returns the corresponding role of certificates; "" if none corresponds.
func (x Role) Peer() peer.Role {
	for p, r := range roles { // in any order: each role is in the map once
		if r == x {
			return p
		}
	}
	return ""
}
