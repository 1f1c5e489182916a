package verbstest

var resourceTests []conformanceTest
